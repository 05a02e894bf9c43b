# SPDX-License-Identifier: Apache-2.0
"""The view of a running job: one frozen Snapshot, and pure functions that make a picture of it."""
