# SPDX-License-Identifier: Apache-2.0
"""Build uffdprefetch._uffd, the cffi module over csrc/service/helper.h (named in setup.py)."""

from glob import glob
from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).resolve().parent.parent / "csrc" / "service" / "helper.h"


def declarations(header: str) -> str:
    """The part of helper.h between its two marks: plain declarations that cffi can read."""
    return header.split("/* cdef begin */")[1].split("/* cdef end */")[0]


ffi = FFI()
ffi.cdef(declarations(HEADER.read_text()))
# test_wire.py compares these with uffdprefetch/protocol/wire.py
ffi.cdef("size_t up_layout(int which);")
ffi.set_source(
    "uffdprefetch._uffd",
    """
    #include "service/helper.h"
    static size_t up_layout(int which)
    {
        static const size_t layout[] = {
            sizeof(struct up_message), sizeof(struct up_hello), sizeof(struct up_attach),
            sizeof(struct up_command), sizeof(struct up_ack), sizeof(struct up_event),
            sizeof(struct up_ring), UP_PAGES_MAX, UP_VERSION, UP_MAGIC,
        };
        return which < (int)(sizeof(layout) / sizeof(layout[0])) ? layout[which] : 0;
    }
    """,
    sources=["csrc/uffd_helper.c", *sorted(glob("csrc/service/**/*.c", recursive=True))],
    include_dirs=["csrc"],
    extra_compile_args=["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"],
    libraries=["pthread"],
)
