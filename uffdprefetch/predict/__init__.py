# SPDX-License-Identifier: Apache-2.0
"""What will be read next, and where to listen. Pure: it asks no clock, no file, no process."""
