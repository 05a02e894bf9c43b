# SPDX-License-Identifier: Apache-2.0
"""uffdprefetch: a page prefetcher for training jobs that read record files by mmap."""

__version__ = "0.1.0.dev0"
