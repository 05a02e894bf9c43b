# SPDX-License-Identifier: Apache-2.0
"""What the service holds: processes, mappings, files, and the books of what came of them."""
