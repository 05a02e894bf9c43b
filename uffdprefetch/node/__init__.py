# SPDX-License-Identifier: Apache-2.0
"""The service: one per node and job (design: serve, clients, files, ledger, snapshot)."""
