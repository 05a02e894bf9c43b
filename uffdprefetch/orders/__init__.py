# SPDX-License-Identifier: Apache-2.0
"""Where orders come from: plan files, announcements, samples, and the process that indexes."""
