# SPDX-License-Identifier: Apache-2.0
"""A trace becomes a report: numbers and words. Pure, but for the indices of record files."""
