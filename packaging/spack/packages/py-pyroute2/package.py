# SPDX-License-Identifier: Apache-2.0

try:
    from spack_repo.builtin.build_systems.python import PythonPackage
except ImportError:  # Spack before 1.0 has it below
    pass
from spack.package import *


class PyPyroute2(PythonPackage):
    """Netlink for Python, without dependencies."""

    homepage = "https://pyroute2.org/"
    pypi = "pyroute2/pyroute2-0.9.1.tar.gz"

    license("GPL-2.0-or-later OR Apache-2.0", checked_by="uffdprefetch")

    version("0.9.1", sha256="5934612ad87a334a2ab3da97090979b46d713427deebfbd34c586dc60a1fd3d5")

    depends_on("python@3.9:", type=("build", "run"))
    depends_on("py-setuptools", type="build")
    depends_on("py-wheel", type="build")
