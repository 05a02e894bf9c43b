# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch wrap [options] [--] CMD...``"""

from __future__ import annotations

import os

from uffdprefetch.base.errors import usage_error
from uffdprefetch.base.messages import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Sequence
    from typing import Any


class Command:
    """Run CMD with the files that it maps or reads prefetched, large and small.

    CMD keeps its standard streams, descriptors, signals and exit status. A summary of a few lines
    goes to stderr and a JSON file is written at the end. Exit status: CMD's; 2 wrong usage;
    125 with --strict if prefetching cannot be had; 126, 127 if CMD cannot be executed.
    UFFDPREFETCH_DISABLE=1 runs CMD as if this command were not there.
    """

    examples = (
        "uffdprefetch wrap ./train.sh",
        "uffdprefetch wrap --engine pool --budget 8GiB mpirun -n 4 python train.py",
        'uffdprefetch wrap --whole "*.safetensors" python serve.py',
        "uffdprefetch wrap --live --trace run -- python train.py",
    )

    @property
    def rare(self) -> Collection[str]:
        from uffdprefetch.base import options

        return options.RARE

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        from uffdprefetch.base import options

        parser.usage = "uffdprefetch wrap [options] [--] CMD..."
        options.add_options(parser)

    def options_end(self, words: Sequence[str]) -> int:
        """See cli/__init__.py."""
        from uffdprefetch.base import options

        return options.options_end(words)

    def parse_plain(self, words: Sequence[str]) -> dict[str, Any] | None:
        from uffdprefetch.base import options

        return options.parse_plain(words)

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if not rest:
            raise usage_error("nothing to run: uffdprefetch wrap [options] [--] CMD...")
        if os.environ.get("UFFDPREFETCH_DISABLE", "") not in ("", "0"):
            from uffdprefetch.base import spawn

            spawn.execute(rest, spawn.inherited_environment())
        from uffdprefetch.base import options, sources

        loaded = sources.load(vars(args))
        replay = None
        if loaded.learn.name is not None:
            from uffdprefetch.launch import replay as replays

            replay = replays.start(loaded, rest, os.environ)
            if replay is not None:  # the service records by that name
                loaded = loaded.but(
                    learn=replay.key, learn_of=replay.of, learn_program=replay.program
                )
        from uffdprefetch.launch import launcher

        for line in options.without_effect(loaded) if not loaded.wrap.quiet else ():
            say(line)
        try:
            return launcher.run(loaded, rest, replay=replay)
        finally:  # of a job that was run this process has ended by now
            if replay is not None:
                replay.end()
