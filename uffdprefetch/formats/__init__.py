# SPDX-License-Identifier: Apache-2.0
"""Record files from the inside: which bytes belong to which record."""
