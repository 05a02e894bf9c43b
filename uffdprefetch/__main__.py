# SPDX-License-Identifier: Apache-2.0
"""``python -m uffdprefetch`` is the same as the console script."""

import sys

from uffdprefetch.cli import main

if __name__ == "__main__":
    sys.exit(main())
