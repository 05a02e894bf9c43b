# SPDX-License-Identifier: Apache-2.0
"""`--engine pool`: the node's own pages, and which of them leave it."""
