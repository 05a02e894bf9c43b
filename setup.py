# SPDX-License-Identifier: Apache-2.0
"""Native parts of the build; everything else is declared in pyproject.toml.

Two objects and a program come out of csrc/. The service's helper is an ordinary cffi extension
(tools/cffi_build.py). uffdprefetch._preload is the LD_PRELOAD object: never imported, only found on
disk by launch/launcher.py. It is declared as an Extension because that is the one way in which
setuptools compiles a shared object and puts it into wheels and editable installs alike. It includes
no Python.h and is linked against no library, the C library included. uffdprefetch/_replay is
declared so for the same reason, and linked as the program that it is (launch/replay.py starts it).
"""

import os
import sysconfig
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

#: By it each exported function begins with a known instruction: csrc/job/bypass.c looks for it.
BRANCH_PROTECTION = {
    "x86_64": ["-fcf-protection=branch"],
    "aarch64": ["-mbranch-protection=bti"],
}

#: Of the wheel that is made, which a cross-compiler may make (tools/wheel_aarch64.sh).
MACHINE = sysconfig.get_platform().rpartition("-")[2]

# Of an earlier build: as a name for one Python alone it would be found first.
for stale in glob("uffdprefetch/_preload.cpython-*.so"):
    os.unlink(stale)

PRELOAD = Extension(
    "uffdprefetch._preload",
    py_limited_api=True,  # nothing of Python's at all: one object for all of them
    sources=[*sorted(glob("csrc/job/*.c")), "csrc/common/vma.c"],
    include_dirs=["csrc"],
    depends=sorted(glob("csrc/**/*.h", recursive=True)),
    extra_compile_args=[
        "-std=gnu11",
        "-O2",
        "-fvisibility=hidden",  # exports mmap & co. and nothing else into the job's namespace
        # The agent runs on a thread that libc does not know of: no TLS, hence no stack canary; and
        # no loop may be turned into a call of the job's memcpy, which may be anybody's.
        "-fno-stack-protector",
        "-fno-tree-loop-distribute-patterns",
        "-U_FORTIFY_SOURCE",
        *BRANCH_PROTECTION.get(MACHINE, []),
        "-Wall",
        "-Wextra",
    ],
    # nostdlib: it loads beside every C library, of any year and any make (csrc/job/preload.c).
    # now: the dynamic linker must not resolve (and lock) lazily under a fault of the job.
    # defs: an undefined symbol that is not weak is an error of this build, not of the user's job.
    # gcc: atomics on AArch64 are calls into it, from a static library.
    extra_link_args=["-nostdlib", "-Wl,-z,now", "-Wl,-z,defs", "-lgcc"],
)

REPLAY = Extension(
    "uffdprefetch._replay",
    py_limited_api=True,  # nothing of Python's at all
    sources=[
        *sorted(glob("csrc/replay/*.c")),
        *sorted(glob("csrc/service/path*.c")),
        *("csrc/service/profile.c", "csrc/service/memory.c", "csrc/service/net/checksum.c"),
    ],
    include_dirs=["csrc"],
    depends=sorted(glob("csrc/**/*.h", recursive=True)),
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
    extra_link_args=["-pthread", "-Wl,-z,now"],
)


class BuildWithPrograms(build_ext):
    """Links what is no object to be loaded as a program, whose file's name has no suffix."""

    def get_ext_filename(self, fullname):
        if fullname.rpartition(".")[2] == "_replay":
            return os.path.join(*fullname.split("."))
        return super().get_ext_filename(fullname)

    def build_extension(self, ext):
        if ext is not REPLAY:
            super().build_extension(ext)
            return
        path = self.get_ext_fullpath(ext.name)
        # one directory of objects for all would have those of the helper, compiled otherwise
        objects = self.compiler.compile(
            ext.sources, os.path.join(self.build_temp, "replay"), include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args, depends=ext.depends,
        )  # fmt: skip
        self.compiler.link_executable(
            objects, os.path.basename(path), os.path.dirname(path),
            extra_postargs=ext.extra_link_args,
        )  # fmt: skip


setup(
    ext_modules=[PRELOAD, REPLAY],
    cmdclass={"build_ext": BuildWithPrograms},
    cffi_modules=["tools/cffi_build.py:ffi"],
    options={
        "bdist_wheel": {"py_limited_api": "cp310"},
        "build_ext": {"parallel": True},  # all at a time
    },
)
