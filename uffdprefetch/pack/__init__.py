# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch pack`: trees of small files, or tars, into one LMDB and back (docs/pack.md).

`walk` and `tars` say what there is, `reading` brings it by many threads, `in_order` keeps these in
order and within bounds, `compress` tries whether it pays, `writer` alone writes; `packing` has the
steps. `stored` reads what was packed and trusts nothing of it, for `verify` and `unpack`.
"""
