# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind for people and programs: summary lines and files."""
