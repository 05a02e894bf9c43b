# SPDX-License-Identifier: Apache-2.0
"""The service of a node and job: its event loop, its peers, its coordinator, its snapshot."""
