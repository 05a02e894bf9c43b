# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch doctor [PATH] [--all | --site] [--cluster] [--json] [--show-config]``"""

from __future__ import annotations

import argparse
import os
import sys


class Command:
    """Try what a run needs, on this machine and for this user, and say what was found.

    Ten lines: the verdict, what works, what it costs not to have the rest, and one cure; --all has
    every check, with what was tried and what follows from it. --site prints what an administrator
    does once on each node, as a script. With PATH (a record file, or an LMDB's directory) its file
    system is tried too, and what the kernel's own readahead (read_ahead_kb) brings there, and could
    bring; with --cluster, in an allocation of several nodes, an MPI process is started on each of
    them, and messages are sent between them. Nothing is changed on the machine. Exit status: 0
    ready, 2 works with limits, 1 cannot.
    """

    examples = (
        "uffdprefetch doctor /scratch/train.lmdb",
        "salloc -N2 uffdprefetch doctor --cluster",
        "uffdprefetch doctor --site > for-the-administrator.sh",
    )

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("path", nargs="?", metavar="PATH", help="a record file or LMDB")
        parser.add_argument("--cluster", action="store_true", help="try the other nodes, too")
        parser.add_argument(
            "--launcher", metavar="COMMAND", default=None, help="as for wrap", dest="launcher"
        )
        parser.add_argument("--meet", metavar="DIR", default=None, help="as for wrap")
        parser.add_argument("--all", action="store_true", help="every check, with its cure")
        parser.add_argument(
            "--site", action="store_true", help="print a script for the node's administrator"
        )
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
        parser.add_argument(
            "--show-config", action="store_true", help="each option, its value, where it is from"
        )
        parser.add_argument(
            "--config", dest="config_file", metavar="FILE", help="as for wrap", default=None
        )

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if args.site:
            from uffdprefetch.doctor import site

            sys.stdout.write(site.SCRIPT)
            return 0
        from uffdprefetch import doctor
        from uffdprefetch.base import options, sources
        from uffdprefetch.doctor import show

        path = args.path or (rest[0] if rest else None)
        told = {"launcher": args.launcher, "meet": args.meet}
        given = {name: value for name, value in told.items() if value is not None}
        loaded = sources.load({"config_file": args.config_file, **given})
        doctor.check_path(path)
        report = doctor.examine(path, loaded, args.cluster)
        settings = options.describe(loaded) if args.show_config else None
        if args.json:
            import json

            document = report.as_dict()
            if settings is not None:
                document["config"] = {
                    key: {"value": value, "origin": origin} for key, value, origin in settings
                }
            print(json.dumps(document, indent=2))
        elif not args.all and settings is None:
            columns = os.get_terminal_size(1).columns or None if sys.stdout.isatty() else None
            sys.stdout.write(show.short(report, columns))
        elif sys.stdout.isatty():
            show.table(report, settings)
        else:
            sys.stdout.write(show.plain(report, settings))
        return report.exit_status
