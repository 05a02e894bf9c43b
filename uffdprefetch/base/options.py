# SPDX-License-Identifier: Apache-2.0
"""The table of options, each defined once for the command line, the UFFDPREFETCH_* variables and
the configuration files; and how the command line is read by it."""

from __future__ import annotations

import os

from uffdprefetch.base.config import (
    ENGINES,
    EVICTIONS,
    FIXED_DISTANCE_BYTES,
    HUGE_PAGES,
    POLICIES,
    PREFIX,
    READS,
    TORCH,
    Config,
)
from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.base.record import record
from uffdprefetch.base.units import format_size_exact, parse_duration, parse_rate, parse_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            import difflib

            near = difflib.get_close_matches(text, words, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise usage_error(f"{text!r} is none of {', '.join(words)}{hint}")
        return text

    return parse


def _unless(word: str, parse: Callable[[str], int]) -> Callable[[str], int | None]:
    return lambda text: None if text.strip().lower() == word else parse(text)


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise usage_error(f"{text!r} is neither 1 nor 0")


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise usage_error(f"not a number: {text!r}") from None


_DEFAULTS = Config().values()
#: UP_NET_NODES of csrc/common/net.h.
NODES_MAX = 1024


def _parse_nodes(text: str) -> int | None:
    """0: as many as the launcher says."""
    if text.strip().lower() in ("off", "auto"):
        return 0 if text.strip().lower() == "auto" else None
    if not text.isascii() or not text.isdigit() or not int(text):
        raise usage_error(f"{text!r} is no number of nodes")
    if len(text) > 9 or int(text) > NODES_MAX:
        raise usage_error(f"{text} nodes are more than the {NODES_MAX} that can share")
    return int(text)


def _format_nodes(value: int | None) -> str:
    return {None: "off", 0: "auto"}.get(value, str(value))


def _parse_path(text: str) -> str:
    try:
        return os.path.abspath(text)
    except OSError:
        raise usage_error(f"{text}: the working directory has been removed") from None


def _parse_spill(text: str) -> str | None:
    """None: nowhere."""
    if text.strip().lower() == "off":
        return None
    from uffdprefetch.base import spill_place

    directory, size_bytes = spill_place.parse(text)
    return spill_place.written(_parse_path(directory), size_bytes)


def _parse_learn(text: str) -> str | None:
    """ "": the program's own profile."""
    if text.strip().lower() in ("off", "auto"):
        return "" if text.strip().lower() == "auto" else None
    if not text.strip() or "\0" in text:
        raise usage_error("a start profile's name is empty")
    return text


def _format_learn(value: str | None) -> str:
    return "off" if value is None else value or "auto"


def _parse_depth(text: str) -> int | None:
    """None: as the file system likes."""
    if text.strip().lower() == "auto":
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise usage_error(f"{text!r} is no number of requests")
    return int(text)


def _parse_globs(text: str) -> tuple[str, ...]:
    return tuple(glob for glob in text.split(os.pathsep) if glob)


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return os.pathsep.join(value) if isinstance(value, tuple) else str(value)


def _format_size(none: str) -> Callable[[Any], str]:
    return lambda value: none if value is None else format_size_exact(value)


@record(frozen=True)
class Option:
    """One option: ``--key`` on the command line, UFFDPREFETCH_KEY, ``key =`` in a TOML file."""

    field: str
    key: str
    parse: Callable[[str], Any]
    help: str
    metavar: str | None = None
    short: str | None = None
    format: Callable[[Any], str] = _format
    choices: tuple[str, ...] = ()
    implied: str | None = None  # what the option means without a value
    joined: bool = False  # its value, if any, is given by =: the next word may be the command

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper().replace("-", "_")

    @property
    def default(self) -> Any:
        return _DEFAULTS[self.field]

    @property
    def is_flag(self) -> bool:
        return self.parse is _parse_bool

    @property
    def is_list(self) -> bool:
        return self.parse is _parse_globs


OPTIONS = (
    Option("output", "output", str,
           "summary file: %%h host, %%p pid, %%j job, %%r rank, %%q{VAR} variable, with"
           " .summary.json appended; a directory: into it; /dev/null: none (default: the last 50"
           " are kept in $XDG_STATE_HOME/uffdprefetch, where `uffdprefetch summary` finds them)",
           "PATTERN",
           "-o", format=lambda value: value or ""),
    Option("force", "force", _parse_bool, "overwrite an existing summary file", short="-f"),
    Option("engine", "engine", _one_of(ENGINES),
           "cache: data in the page cache, readers followed by page tables (default);"
           " pool: data in memory of our own, read once per node, at most --budget (at least 1MiB;"
           " default with --cluster);"
           " off: touch nothing in the job", "|".join(ENGINES), choices=ENGINES),
    Option("evict", "evict", _one_of(EVICTIONS),
           "what leaves a full pool: cyclic: keep a part of the file over the epochs (default);"
           " lru: what was touched longest ago", "|".join(EVICTIONS), choices=EVICTIONS),
    Option("huge_pages", "huge-pages", _one_of(HUGE_PAGES),
           "the pool's memory in huge pages where the kernel gives them to shared memory (auto,"
           " default) or never (off)", "|".join(HUGE_PAGES), choices=HUGE_PAGES),
    Option("spill", "spill", _parse_spill,
           "what leaves the pool's memory goes into a file without a name in this directory, on a"
           " disk of this node, and comes back from there (default: off; SIZE: half of what is"
           " free; docs/pool.md)", "DIR[:SIZE]", format=lambda value: value or "off"),
    Option("policy", "policy", _one_of(POLICIES),
           "auto: read ahead what pays, by what a wrong guess costs (default); fixed: --size at"
           " once, by checkpoints that are laid over mappings --distance apart;"
           " stride: ranks skip each other's records, prefetch only their own;"
           " plan: follow orders that are known, else prefetch nothing;"
           " none: watch, prefetch nothing", "|".join(POLICIES), choices=POLICIES),
    Option("size_bytes", "size", parse_size,
           "bytes prefetched at once with --policy fixed (default: 50MiB)", "SIZE",
           format=format_size_exact),
    Option("distance_bytes", "distance", _unless("auto", parse_size),
           "with --policy fixed: least bytes between the checkpoints of a mapping (default:"
           f" {format_size_exact(FIXED_DISTANCE_BYTES)}); else the step in which a stream's"
           " progress is counted (default: measured). Ignored for known orders and by"
           " --engine pool",
           "SIZE",
           format=_format_size("auto")),
    Option("threshold", "threshold", _parse_float,
           "part of the window after which the next one is fetched (default: 0.75)", "0..1"),
    Option("budget_bytes", "budget", parse_size,
           "bytes that may lie ahead of the readers on this node; with --engine pool, the size of"
           " the pool (default: 4GiB)", "SIZE",
           format=format_size_exact),
    Option("max_rate_bytes_per_second", "max-rate", _unless("none", parse_rate),
           "cap on what prefetching reads (default: none)", "RATE", format=_format_size("none")),
    Option("include", "include", _parse_globs, "only files that match (repeatable)", "GLOB"),
    Option("exclude", "exclude", _parse_globs, "no files that match (repeatable)", "GLOB"),
    Option("whole", "whole", _parse_globs,
           "files of which the job will need all bytes: what fits --budget is read in order as soon"
           " as it is mapped (repeatable)", "GLOB"),
    Option("cluster", "cluster", _parse_nodes,
           "share what is read with the run's other nodes, by MPI: each byte is read once for all"
           " (--engine pool; N: how many nodes there are, where the launcher does not say;"
           " docs/cluster.md)", "N", format=_format_nodes, implied="auto"),
    Option("meet", "meet", _parse_path,
           "the directory in which the nodes of --cluster meet, on a file system that all see"
           " (default: the current one)", "DIR"),
    Option("share", "share", _parse_globs,
           "files on FUSE of which all nodes see the same bytes (repeatable; --cluster shares those"
           " on network file systems by itself)", "GLOB"),
    Option("launcher", "launcher", str,
           "what starts an MPI process on each node of --cluster, with options of its own: an srun,"
           " mpirun or mpiexec (default: whichever is found to work)", "COMMAND"),
    Option("serve_cpu", "serve-cpu", _parse_float,
           "cores that the service may use to answer the other nodes of --cluster; what is asked"
           " beyond that they read from storage (default: 1)", "CORES"),
    Option("min_size_bytes", "min-size", parse_size,
           "leave smaller mappings alone; of files that are read by calls smaller ones count as"
           " small files (default: 16MiB)", "SIZE", format=format_size_exact),
    Option("reads", "reads", _one_of(READS),
           "follow files that are read by read(2), pread(2) and the like, and directories of small"
           " files, from outside (auto, default; docs/reads.md), or leave them to the kernel (off)",
           "|".join(READS), choices=READS),
    Option("plan", "plan", _parse_path,
           "the order in which each rank reads its records, or its files (docs/plans.md;"
           " `uffdprefetch plan FILE` checks one)", "FILE"),
    Option("torch", "torch", _one_of(TORCH),
           "follow the order of PyTorch DataLoaders, where it can be told (auto, default;"
           " docs/pytorch.md; debug: and say on stderr why not), or leave PyTorch alone (off)",
           "|".join(TORCH), choices=TORCH),
    Option("learn", "learn", _parse_learn,
           "record which files the program reads when it starts, and in which order ranks read"
           " mapped ones, and read them ahead when it is started again (default: off; NAME: of the"
           " record, in place of one for each program; docs/learn.md)",
           "NAME", format=_format_learn, implied="auto", joined=True),
    Option("learn_depth", "learn-depth", _parse_depth,
           "requests of --learn at a time (default: 32, on Lustre 16)", "N",
           format=lambda value: "auto" if value is None else str(value)),
    Option("learn_budget_bytes", "learn-budget", parse_size,
           "bytes that --learn reads ahead of a start at the most (default: 1GiB)", "SIZE",
           format=format_size_exact),
    Option("learn_dir", "learn-dir", _parse_path,
           "a directory with records of --learn, which are read where the user has none, and never"
           " written", "DIR", format=lambda value: value or ""),
    Option("trace", "trace", str,
           "record what the kernel and the service see into this file (tokens as in -o,"
           " .uptrace is appended; `uffdprefetch trace FILE` shows it)", "FILE"),
    Option("live", "live", _parse_bool,
           "show how it goes on stderr while the job runs: a panel at the bottom of a terminal,"
           " else a line every --interval"),
    Option("interval_seconds", "interval", parse_duration,
           "time between two lines of --live into a file or pipe (default: 10)", "TIME"),
    Option("ownlock", "ownlock", _parse_bool,
           "give each rank a lock file of its own for every LMDB that it opens read-only (the data"
           " set's folder is not written; only while nobody writes the data set)"),
    Option("strict", "strict", _parse_bool,
           "exit with 125 instead of running the job without prefetching"),
    Option("quiet", "quiet", _parse_bool, "no summary on stderr", short="-q"),
    Option("verbose", "verbose", _parse_bool, "say what is decided and why", short="-v"),
)  # fmt: skip
BY_KEY = {option.key: option for option in OPTIONS}
_BY_SHORT = {option.short: option for option in OPTIONS if option.short}
BY_VARIABLE = {option.variable: option for option in OPTIONS}


#: Titles of the help, and the options under each.
GROUPS = (
    ("what is served", ("include", "exclude", "min-size", "whole", "reads", "plan", "torch")),
    (
        "how",
        (
            *("engine", "policy", "budget", "max-rate", "evict", "huge-pages", "spill"),
            *("size", "distance", "threshold"),
        ),
    ),
    ("the start", ("learn", "learn-depth", "learn-budget", "learn-dir")),
    ("many nodes", ("cluster", "meet", "share", "launcher", "serve-cpu")),
    (
        "what is said and written",
        ("output", "force", "quiet", "verbose", "live", "interval", "trace"),
    ),
    ("besides", ("strict", "ownlock")),
)

#: Those that one begins with: --help shows them, and leaves the others to --help-all.
COMMON = frozenset((
    "include", "exclude", "whole", "plan", "reads", "engine", "policy", "budget", "output", "quiet",
    "verbose", "live", "trace",
))  # fmt: skip
#: These others, and what add_options() adds by itself, as they are written.
RARE = frozenset((
    "--headless", "--config", *(f"--{one.key}" for one in OPTIONS if one.key not in COMMON),
))  # fmt: skip


def add_options(parser: argparse.ArgumentParser, left_out: Collection[str] = ()) -> None:
    """Add every option, and --config, to ``parser``, but for those ``left_out`` (keys); options
    without a value stay unset."""
    import argparse

    groups = {
        key: group
        for title, keys in GROUPS
        for group in [parser.add_argument_group(title)]
        for key in keys
    }
    for option in OPTIONS:
        if option.key in left_out:
            continue
        add = groups[option.key].add_argument
        flags = [*([option.short] if option.short else []), f"--{option.key}"]
        common: dict[str, Any] = {
            "dest": option.field,
            "default": argparse.SUPPRESS,
            "help": option.help,
        }
        if option.is_flag:
            add(*flags, action="store_const", const="1", **common)
        elif option.is_list:
            add(*flags, action="append", metavar=option.metavar, **common)
        elif option.implied is not None:
            add(*flags, nargs="?", const=option.implied, metavar=option.metavar, **common)
        else:
            add(*flags, metavar=option.metavar, **common)
    if "live" not in left_out:
        groups["live"].add_argument(
            "--headless", dest="live", action="store_const", const="0", default=argparse.SUPPRESS,
            help="the opposite of --live, where a file or a variable asks for it",
        )  # fmt: skip
    groups["strict"].add_argument(
        "--config", dest="config_file", default=argparse.SUPPRESS, metavar="FILE",
        help="read this file instead of ./uffdprefetch.toml and the one in $XDG_CONFIG_HOME",
    )  # fmt: skip


def options_end(words: Sequence[str], others: Collection[str] = ()) -> int:
    """Where the options of `wrap` end and its command begins, if it is not told by ``--``: at the
    first word that is neither an option nor the value of one (len(words): nowhere). ``others``:
    keys of more options that take a value."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        takes = words[at][2:] in others or _takes_the_next(words[at], words[at + 1 : at + 2])
        at += 1 + takes
    return min(at, len(words))


def as_words(args: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give the options again which are in ``args``, vars() of a
    namespace that add_options() filled."""
    words = [
        f"--{option.key}" if option.is_flag else f"--{option.key}={value}"
        for option in OPTIONS
        if (given := args.get(option.field)) is not None and option.key != "engine"
        for value in (given if option.is_list else [given])
    ]
    config = args.get("config_file")
    return words if config is None else [*words, f"--config={config}"]


def _takes_the_next(word: str, following: Sequence[str]) -> bool:
    """Whether an option's value is the word after it. ``following``: that, if there is one."""
    if not following:
        return False
    if word.startswith("--"):
        key, given, _ = word.partition("=")
        option = BY_KEY.get(key[2:])
        if given or (option is None and key != "--config"):
            return False
        return option is None or _takes(option, following[0])
    for at, letter in enumerate(word[1:], 1):  # flags may stand together: -qfo NAME
        option = _BY_SHORT.get(f"-{letter}")
        if option is None:
            return False
        if not option.is_flag:
            return at == len(word) - 1 and _takes(option, following[0])
    return False


def _takes(option: Option, text: str) -> bool:
    if option.implied is None:
        return not option.is_flag
    if option.joined:
        return False
    try:
        option.parse(text)
    except UffdPrefetchError:
        return False
    return True


def parse_plain(words: Sequence[str]) -> dict[str, Any] | None:
    """What argparse makes of the options of `wrap` with add_options(), without loading it; None
    where that is not plain: a word that is no option as the help shows it, or lacks its value. Then
    argparse is to be asked, which also has the words for what is wrong."""
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, given, value = word.partition("=")
        option = _BY_SHORT.get(word) or (BY_KEY.get(key[2:]) if key.startswith("--") else None)
        if option is None or (given and option.is_flag):
            return None
        if option.is_flag:
            value = "1"
        elif not given:
            alone = not rest or rest[0].startswith("-") or option.joined
            if alone and option.implied is None:
                return None
            value = option.implied or "" if alone else rest.pop(0)
        if option.is_list:
            values.setdefault(option.field, []).append(value)
        else:
            values[option.field] = value
    return values


#: Options that only do something beside another one, and whether it is there.
_NEED: tuple[tuple[tuple[str, ...], str, Callable[[Config], bool]], ...] = (
    (("size", "threshold"), "--policy fixed", lambda config: config.policy == "fixed"),
    (("evict", "huge-pages", "spill"), "--engine pool", lambda config: config.engine == "pool"),
    (
        ("meet", "share", "launcher", "serve-cpu"),
        "--cluster",
        lambda config: config.cluster.nodes is not None,
    ),
    (("interval",), "--live", lambda config: config.wrap.live),
    (
        ("learn-depth", "learn-budget", "learn-dir"),
        "--learn",
        lambda config: config.learn.name is not None,
    ),
)


def without_effect(config: Config) -> list[str]:
    """A line for each option of the command line that does nothing as it stands."""
    return [
        f"--{key} does nothing without {other}"
        for keys, other, holds in _NEED
        if not holds(config)
        for key in keys
        if config.source.origins.get(BY_KEY[key].field) == "command line"
    ]


def describe(config: Config) -> list[tuple[str, str, str]]:
    """(key, value, origin) of each option, for ``doctor --show-config``."""
    return [
        (option.key, option.format(config.value(option.field)), config.source.origins[option.field])
        for option in OPTIONS
    ]


def as_variables(config: Config) -> dict[str, str]:
    """The UFFDPREFETCH_* variables that pass the options to a nested wrap; an explicit value also
    where it is the default, else a file could override it there."""
    variables = {}
    for option in OPTIONS:
        value = config.value(option.field)
        made = config.source.origins.get(option.field, "default") != "default"
        if value != option.default or made:
            variables[option.variable] = option.format(value)
    return variables
