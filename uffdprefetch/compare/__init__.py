# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch compare`: a job plainly and under `wrap`, in turns, each cold."""
