# SPDX-License-Identifier: Apache-2.0
"""A reader in a known order: where it is, whether the order is right, what comes next. Pure."""
