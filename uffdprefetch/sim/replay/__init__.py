# SPDX-License-Identifier: Apache-2.0
"""`simulate --replay TRACE`: a recorded job's accesses under other policies.

trace -> demand (accesses and think times) -> policy and link -> outcome
"""
