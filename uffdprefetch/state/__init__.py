# SPDX-License-Identifier: Apache-2.0
"""The service's state: processes, mappings, files, and the ledger of costs and results."""
