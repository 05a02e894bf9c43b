# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch wrap`: finds or starts the service, runs the job, reports."""
