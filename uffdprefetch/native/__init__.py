# SPDX-License-Identifier: Apache-2.0
"""cffi bindings of csrc/: numbers and bytes in, OSError out; no rank, stream or policy."""
