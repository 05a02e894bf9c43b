# SPDX-License-Identifier: Apache-2.0
"""The cffi faces of csrc/: numbers and bytes in, OSError out; no rank, stream or policy."""
