# SPDX-License-Identifier: Apache-2.0
"""Shared by all packages: errors, units, options, ranges, /proc. Imports nothing of ours."""
