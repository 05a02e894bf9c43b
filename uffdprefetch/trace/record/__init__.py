# SPDX-License-Identifier: Apache-2.0
"""The recorder: takes what the kernel and our service report, and keeps it in a trace file."""
