# SPDX-License-Identifier: Apache-2.0
"""What runs in the job's own Python: the standard library only, Python 3.8 and later.

``site/sitecustomize.py`` loads it by its path as the package ``_uffdprefetch_job``, because the
job's interpreter need not know the package ``uffdprefetch``. So imports in here are relative.
"""
