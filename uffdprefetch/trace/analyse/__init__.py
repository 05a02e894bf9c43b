# SPDX-License-Identifier: Apache-2.0
"""A trace becomes a report: numbers and words. Pure, but for the indices of record files.

Where a threshold names no source, it is one by which streams whose truth is known get their right
names: made ones (tests/unit/trace) and recorded ones (tests/kernel/test_trace_ground_truth.py).
"""
