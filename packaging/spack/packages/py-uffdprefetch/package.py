# SPDX-License-Identifier: Apache-2.0

try:
    from spack_repo.builtin.build_systems.python import PythonPackage
except ImportError:  # Spack before 1.0 has it below
    pass
from spack.package import *


class PyUffdprefetch(PythonPackage):
    """Page prefetcher for jobs that read large files by mmap from a parallel file system."""

    homepage = "https://pypi.org/project/uffdprefetch/"
    pypi = "uffdprefetch/uffdprefetch-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("cluster", default=True, description="Nodes pass on what they have read, by MPI")
    variant("plot", default=False, description="Pictures of recordings and simulations")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "link", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-cffi@1.16:", type=("build", "run"))
    depends_on("py-msgpack@1:", type=("build", "run"))
    depends_on("py-numpy@1.24:", type=("build", "run"))
    depends_on("py-pyroute2@0.7:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-tomli@2:", type=("build", "run"), when="^python@:3.10")
    depends_on("py-mpi4py@3.1:", type="run", when="+cluster")
    depends_on("py-matplotlib@3.7:", type="run", when="+plot")
    depends_on("py-scipy@1.10:", type="run", when="+plot")

    conflicts("platform=darwin", msg="userfaultfd is Linux's")
    conflicts("platform=windows", msg="userfaultfd is Linux's")
