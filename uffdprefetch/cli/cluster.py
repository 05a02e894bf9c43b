# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch cluster [options] [--] CMD...``"""

from __future__ import annotations

import os

from uffdprefetch.base.errors import usage_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Sequence


class Command:
    """Run CMD, a launcher of many nodes, with the nodes' memories as one pool.

    For a batch script: `uffdprefetch cluster -- srun python train.py`. Starts a service on each
    node of the allocation (a step of Slurm's, else by the mpirun or mpiexec of mpi4py's MPI), then
    CMD, whose programs find the service of the node they are on. What one node has read no other
    one reads: it comes by MPI (docs/cluster.md). Where a node has none, or nothing can be shared,
    one line says so, and CMD runs all the same.

    The options are those of wrap, --engine pool and --cluster among them. One summary for all nodes
    is written and printed at the end. Exit status: CMD's; 2 wrong usage; 125 with --strict if a
    node has no service; 126, 127 if CMD cannot be executed.
    """

    examples = (
        "uffdprefetch cluster srun python train.py",
        "uffdprefetch cluster --budget 32GiB -- mpirun python train.py",
    )

    @property
    def rare(self) -> Collection[str]:
        from uffdprefetch.base import options

        # what is read by calls is each node's own
        return options.RARE - {"--meet", "--share", "--launcher"} | {"--reads"}

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        from uffdprefetch.base import options

        parser.usage = "uffdprefetch cluster [options] [--] CMD..."
        options.add_options(parser)

    def options_end(self, words: Sequence[str]) -> int:
        """See cli/__init__.py."""
        from uffdprefetch.base import options

        return options.options_end(words)

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if not rest:
            raise usage_error("nothing to run: uffdprefetch cluster [options] [--] CMD...")
        if os.environ.get("UFFDPREFETCH_DISABLE", "") not in ("", "0"):
            from uffdprefetch.base import spawn

            spawn.execute(rest, spawn.inherited_environment())
        from uffdprefetch.base import sources
        from uffdprefetch.launch import on_nodes

        return on_nodes.run(sources.load(vars(args)), rest)
