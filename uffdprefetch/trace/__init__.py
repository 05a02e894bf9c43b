# SPDX-License-Identifier: Apache-2.0
"""Who read what, when, and what it cost: recorded, kept in a file, understood."""
