# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch serve`: started by `wrap`, not by people."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from uffdprefetch.base.config import SERVED_VARIABLE, Config
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.service.serve import serve

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


_PLAIN = {
    "--socket": str, "--log": str, "--starter": int, "--lock": int, "--listener": int,
    "--start-log": int,
}  # fmt: skip


class Log(logging.FileHandler):
    """A log file opened at the first warning; failing to open it is ignored."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            pass  # the service works without a log


class Command:
    """Serve the ranks of one job on this node (started by wrap)."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--socket", required=True, help="path of the socket to listen on")
        parser.add_argument("--log", required=True, help="file for warnings, made with the first")
        parser.add_argument("--starter", type=int, default=0, help="pid of the launcher")
        parser.add_argument("--lock", type=int, help="descriptor of the lock, with --listener")
        parser.add_argument("--listener", type=int, help="descriptor of the socket that listens")
        parser.add_argument("--start-log", type=int, help="descriptor of the start log (--learn)")

    def parse_plain(self, words: Sequence[str]) -> dict[str, Any] | None:
        """What argparse makes of the words of launch/service.py, without loading it; None for
        others."""
        values: dict[str, Any] = {
            "starter": 0, "lock": None, "listener": None, "start_log": None,
        }  # fmt: skip
        try:
            for name, value in zip(words[::2], words[1::2], strict=True):
                values[name[2:].replace("-", "_")] = _PLAIN[name](value)
        except (KeyError, ValueError):
            return None
        return values if values.keys() >= {"socket", "log"} else None

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        text = os.environ.get(SERVED_VARIABLE)
        config = Config.from_json(text) if text else Config()
        logging.basicConfig(
            handlers=[Log(args.log, delay=True)],
            level=logging.INFO if config.wrap.verbose else logging.WARNING,
            format="%(asctime)s %(levelname)s %(message)s",
        )
        try:
            key = os.environ.get("UFFDPREFETCH_RUN", "?")
            inherited = None if args.lock is None else (args.lock, args.listener)
            return serve(args.socket, config, key, args.starter, inherited, args.start_log)
        except UffdPrefetchError as error:
            logging.error("%s", error.message)
            raise
        except BaseException:
            logging.exception("the service failed")
            raise
