# SPDX-License-Identifier: Apache-2.0
"""On the PYTHONPATH of a job, this puts the recorder into its service, and only there."""

import os
import sys

if "UFFDPREFETCH_TEST_TAPE" in os.environ and "serve" in sys.orig_argv:
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))
    from tests.net import recorder

    recorder.install(os.environ["UFFDPREFETCH_TEST_TAPE"])
