# SPDX-License-Identifier: Apache-2.0
"""What every package may use: errors, units, options, ranges, /proc. Imports nothing of ours."""
