# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch serve`: started by `wrap`, not by people."""

from __future__ import annotations

import argparse
import logging
import os

from uffdprefetch.config import Config
from uffdprefetch.node.serve import serve


class Command:
    """Serve the ranks of one job on this node (started by wrap)."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--socket", required=True, help="path of the socket to listen on")
        parser.add_argument("--log", required=True, help="file for warnings")

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        text = os.environ.get("UFFDPREFETCH_SERVE_CONFIG")
        config = Config.from_json(text) if text else Config()
        logging.basicConfig(
            filename=args.log,
            level=logging.INFO if config.verbose else logging.WARNING,
            format="%(asctime)s %(levelname)s %(message)s",
        )
        try:
            return serve(args.socket, config, os.environ.get("UFFDPREFETCH_RUN", "?"))
        except BaseException:
            logging.exception("the service failed")
            raise
