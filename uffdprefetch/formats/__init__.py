# SPDX-License-Identifier: Apache-2.0
"""Record formats: which bytes of a file belong to which record.

``detect.open_index(path)`` gives the RecordIndex of a file, ``cache.open_cached(path)`` the same,
shared by all processes of a node. A new format is one file here with one class (``sniff`` and
``read``, see detect.Format) and one line in ``detect.FORMATS``.
"""
