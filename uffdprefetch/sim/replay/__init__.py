# SPDX-License-Identifier: Apache-2.0
"""`simulate --replay TRACE`: a recorded job's accesses through other policies.

trace -> demand (who wants what, after how much computing) -> policy and link -> outcome
"""
