# SPDX-License-Identifier: Apache-2.0
"""The trace file: blocks of events, and how they are written and read."""
