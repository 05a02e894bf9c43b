# SPDX-License-Identifier: Apache-2.0
"""Who is where: touches become streams. Pure: no file, no process, no clock of its own."""
