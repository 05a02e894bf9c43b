# SPDX-License-Identifier: Apache-2.0
"""Build uffdprefetch._uffd, the cffi module over service/helper.h, common/wire.h, common/net.h and
common/startlog.h of csrc/ (named in setup.py)."""

from glob import glob
from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).resolve().parent.parent / "csrc"


def declarations(name: str) -> str:
    """The part of a header between its two marks: plain declarations that cffi can read."""
    header = (CSRC / name).read_text()
    return header.split("/* cdef begin */")[1].split("/* cdef end */")[0]


ffi = FFI()
ffi.cdef(declarations("common/net.h"))
ffi.cdef(declarations("common/wire.h"))
ffi.cdef(declarations("common/startlog.h"))
ffi.cdef(declarations("service/helper.h"))
ffi.cdef("struct up_ring { struct up_event event[...]; ...; };")  # tests look for the events
ffi.set_source(
    "uffdprefetch._uffd",
    '#include "service/helper.h"\n#include "common/startlog.h"',
    sources=["csrc/uffd_helper.c", *sorted(glob("csrc/service/**/*.c", recursive=True))],
    include_dirs=["csrc"],
    depends=sorted(glob("csrc/**/*.h", recursive=True)),
    extra_compile_args=["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"],
    # now: csrc/service/pool/guardian.c gives back the memory in which the linker would look
    extra_link_args=["-Wl,-z,now"],
    libraries=["pthread"],
)
