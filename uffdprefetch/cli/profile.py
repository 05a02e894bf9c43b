# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch profile list|show|remove|export [KEY|FILE] [DIR] [--json]``"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import TYPE_CHECKING

from uffdprefetch.base.errors import EXIT_CANNOT, UffdPrefetchError, usage_error
from uffdprefetch.base.start_key import SUFFIX, profile_directory, profile_path, ranges_beside
from uffdprefetch.base.units import MAX_BYTES

if TYPE_CHECKING:
    from uffdprefetch.orders.learned_plan import LearnedPlan
    from uffdprefetch.orders.start_profile import StartProfile
    from uffdprefetch.report.start import ShownOrder

ACTIONS = ("list", "show", "remove", "export")


class Command:
    """See and keep the start profiles that `wrap --learn` has recorded, and with each the orders in
    which ranks have read mapped files.

    list: all of yours, what program each is of, when a start was recorded and when it was used
    last, and what is wrong with those that are none. show: what the profile KEY has
    read; FILE: any profile. remove: forget it; the next start is recorded anew. export: write it
    into DIR, for `--learn-dir`. Exit status: 0; 1 when a profile cannot be read or written; 2
    when there is none of that name, or the file is none.
    """

    examples = (
        "uffdprefetch profile list",
        "uffdprefetch profile show 0f3a2c7d51e8b96404c7a2d1",
        "uffdprefetch profile export train /sw/profiles",
    )

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("action", choices=ACTIONS, metavar="|".join(ACTIONS), help="what to do")
        parser.add_argument("profile", nargs="?", metavar="KEY|FILE", help="which profile")
        parser.add_argument("directory", nargs="?", metavar="DIR", help="where to export it to")
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout")

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("profile shows what was recorded: nothing goes after --")
        wanted = {"list": 0, "show": 1, "remove": 1, "export": 2}[args.action]
        words = [word for word in (args.profile, args.directory) if word is not None]
        if len(words) != wanted:
            names = ("nothing", "a KEY or a FILE", "a KEY or a FILE, and a DIR")
            raise usage_error(f"profile {args.action}: wants {names[wanted]} after it")
        if args.json and args.action not in ("list", "show"):
            raise usage_error(
                f"profile {args.action} shows nothing: --json goes with list and show"
            )
        getattr(self, f"_{args.action}")(args)
        return 0

    def _list(self, args: argparse.Namespace) -> None:
        from uffdprefetch.orders import learned_ranges, profile_store
        from uffdprefetch.report import start as report
        from uffdprefetch.report.columns import show

        directory = own_directory()
        try:
            profiles, orders = profile_store.stored(directory), learned_ranges.kept_in(directory)
            document = report.list_document(directory, profiles, orders, time.time_ns())
        except OSError as error:
            raise _cannot("list", directory, error) from None
        show(document, report.list_text(document), args.json)

    def _show(self, args: argparse.Namespace) -> None:
        from uffdprefetch.orders import profile_store
        from uffdprefetch.report import start as report
        from uffdprefetch.report.columns import show

        path = _kept(args.profile)
        of = profile_store.described(path)
        document = report.show_document(path, of, _load(path), _orders(path))
        show(document, report.show_text(document), args.json)

    def _remove(self, args: argparse.Namespace) -> None:
        from uffdprefetch.orders import learned_ranges, profile_store

        path = _kept(args.profile)
        _load(path)  # no file is removed that is no profile
        try:
            with contextlib.suppress(FileNotFoundError):  # of this key there are orders only
                profile_store.remove(path)
            learned_ranges.remove_all(ranges_beside(path))
        except OSError as error:
            raise _cannot("remove", path, error) from None

    def _export(self, args: argparse.Namespace) -> None:
        from uffdprefetch.orders import profile_store

        path = _kept(args.profile)
        there = os.path.join(args.directory, os.path.basename(path))
        if not os.path.isdir(args.directory):
            raise usage_error(f"{args.directory}: it is no directory")
        try:
            if os.path.lexists(path):
                # a site's is for everybody's eyes
                profile_store.store(there, load(path), profile_store.described(path), 0o644)
            _export_orders(ranges_beside(path), ranges_beside(there))
        except OSError as error:
            raise _cannot("write", there, error) from None


def own_directory() -> str:
    """Where the user's profiles lie. Raises UffdPrefetchError where no place is named."""
    directory = profile_directory(os.environ)
    if directory is None:
        raise UffdPrefetchError(
            "no place for start profiles: neither XDG_CACHE_HOME nor HOME is set", EXIT_CANNOT
        )
    return directory


def path_of(text: str) -> str:
    """The file of a KEY of the user's profiles, or a FILE. Raises UffdPrefetchError (exit 2) where
    there is none."""
    if os.path.sep in text or text.endswith(SUFFIX):
        path, what = text, text
    else:
        path = profile_path(own_directory(), text)
        what = f"no start profile {text!r} in {own_directory()}"
    if os.path.lexists(path):
        return os.path.abspath(path)
    if path == text:
        raise usage_error(f"{what}: there is no such file")
    raise usage_error(f"{what}: `uffdprefetch profile list` shows which there are")


def _kept(text: str) -> str:
    """The same, where there may be nothing but orders of that key."""
    path = text
    if os.path.sep not in text and not text.endswith(SUFFIX):
        path = profile_path(own_directory(), text)
    return os.path.abspath(path) if os.path.isdir(ranges_beside(path)) else path_of(text)


def _load(path: str) -> StartProfile:
    """Of a path of _kept(). Raises UffdPrefetchError."""
    from uffdprefetch.orders.start_profile import StartProfile

    return load(path) if os.path.lexists(path) else StartProfile()


def _orders(path: str) -> list[ShownOrder]:
    """Those that were kept with a profile, as they are shown. Raises UffdPrefetchError."""
    from uffdprefetch.orders import learned_ranges
    from uffdprefetch.report.start import ShownOrder

    directory, found = ranges_beside(path), list[ShownOrder]()
    for name in _order_names(directory):
        taken, _ = learned_ranges.sizes(directory, name)
        try:
            found.append(ShownOrder(name, taken, _order(directory, name)))
        except UffdPrefetchError as error:
            found.append(ShownOrder(name, taken, None, error.message))
    return found


def _export_orders(directory: str, there: str) -> None:
    """Write them again. Raises OSError, UffdPrefetchError."""
    from uffdprefetch.orders import learned_ranges

    names = _order_names(directory)
    for name in names:
        plan = _order(directory, name)
        learned_ranges.store(there, name, plan.file, plan.spans(MAX_BYTES), 0o644)
    if names:
        os.chmod(there, 0o755)


def _order_names(directory: str) -> list[str]:
    from uffdprefetch.orders import learned_ranges

    try:
        return learned_ranges.names(directory)
    except OSError as error:
        raise _cannot("list", directory, error) from None


def _order(directory: str, name: str) -> LearnedPlan:
    from uffdprefetch.orders import learned_plan, learned_ranges

    return learned_plan.load(learned_ranges.document_path(directory, name))


def load(path: str) -> StartProfile:
    """Raises UffdPrefetchError: 1 where it cannot be read, 2 where it is none."""
    from uffdprefetch.orders import profile_store

    try:
        return profile_store.load(path)
    except OSError as error:
        raise _cannot("read", path, error) from None
    except UffdPrefetchError as error:
        raise usage_error(error.message) from None


def _cannot(what: str, path: str, error: OSError) -> UffdPrefetchError:
    return UffdPrefetchError(f"cannot {what} {path}: {error.strerror}", EXIT_CANNOT)
