# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch calibrate`: bandwidth curves of the machine at hand, with their intervals."""
