# SPDX-License-Identifier: Apache-2.0
"""The program on a real Lustre client: what runs in a guest, and what starts the guest.

guest.py boots the image that UFFDPREFETCH_LUSTRE names and runs the tests of this directory there,
or measure.py; docs/lustre.md says how such an image is made.
"""
