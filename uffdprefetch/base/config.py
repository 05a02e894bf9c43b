# SPDX-License-Identifier: Apache-2.0
"""The options of a run, and where each value came from.

One table (OPTIONS) defines every option once, for the command line, the UFFDPREFETCH_* variables
and the configuration files. Precedence: command line > environment > ./uffdprefetch.toml >
$XDG_CONFIG_HOME/uffdprefetch/config.toml > default (with ``--config F``, F takes the place of both
files).
"""

from __future__ import annotations

import os
import sys
import zlib

from uffdprefetch.base import jsontext
from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.base.record import field, record
from uffdprefetch.base.units import format_size_exact, parse_duration, parse_rate, parse_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

MIB = 1 << 20
PAGE_BYTES = 4096
ENGINES = ("cache", "pool", "off")
EVICTIONS = ("cyclic", "lru")
HUGE_PAGES = ("auto", "off")
TORCH = ("auto", "off", "debug")
POLICIES = ("auto", "fixed", "stride", "plan", "none")
#: Default distance of `--policy fixed`: a checkpoint per 8 MiB ([Haderbache] section 4).
FIXED_DISTANCE_BYTES = 8 * MIB
#: `--distance auto` where checkpoints are placed. Each costs a request of one page, where
#: prefetching makes one of 4 MiB: at this distance they add at most a tenth.
SPACING_BYTES = 40 * MIB
#: Least size of a pool, sixteen chunks: with less, a few threads at different positions keep
#: evicting each other's. (UFFDPREFETCH_TEST_POOL_LEAST overrides it in tests.)
POOL_LEAST_BYTES = MIB

PREFIX = "UFFDPREFETCH_"
#: Options that do not concern the service.
_OF_THE_LAUNCHER = (
    *("strict", "quiet", "verbose", "output", "force", "config_file", "trace", "ownlock"),
    *("live", "interval_seconds", "engine_asked", "engine_reason", "place"),
)
#: Tells the preload object where the ranks' own lock files go (`--ownlock`). Not the option's own
#: variable, which hands the choice to a nested wrap.
LOCKS_VARIABLE = PREFIX + "LOCKDIR"
#: Our variables that are no options: set by wrap for the job and the service, or test switches.
INTERNAL_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("RUN", "RUNG", "DISABLE", "SOCKET", "RUNDIR"),
        *("SERVE_CONFIG", "KEEP_ADVICE", "CONFIG", "LOCKDIR", "POOL_CHUNK", "LISTEN"),
        *("LUSTRE", "SLURMBED", "CLUSTER_RUN", "CLUSTER_NODE", "CLUSTER_NODES", "GROUP"),
    )
)


def _matches(path: str, globs: Iterable[str]) -> bool:
    """Whether one of them fits. A glob with a slash is matched against the whole path, one without
    against the last part."""
    import fnmatch

    name = os.path.basename(path)
    return any(fnmatch.fnmatchcase(path if "/" in g else name, g) for g in globs)


@record(frozen=True)
class Config:
    """All options of a run; sizes in bytes. ``origins`` maps a field's name to where it is from."""

    engine: str = "cache"
    evict: str = "cyclic"
    huge_pages: str = "auto"
    policy: str = "auto"
    size_bytes: int = 50 * MIB
    distance_bytes: int | None = None
    threshold: float = 0.75
    budget_bytes: int = 4 << 30
    max_rate_bytes_per_second: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    cluster: int | None = None
    meet: str | None = None
    share: tuple[str, ...] = ()
    launcher: str | None = None
    serve_cpu: float = 1.0
    min_size_bytes: int = 16 * MIB
    plan: str | None = None
    torch: str = "auto"
    trace: str | None = None
    ownlock: bool = False
    strict: bool = False
    quiet: bool = False
    verbose: bool = False
    live: bool = False
    interval_seconds: float = 10.0
    output: str | None = None  # None: in the user's state directory
    force: bool = False
    config_file: str | None = None
    engine_asked: str | None = None  # of a run that fell back: the requested engine, and why
    engine_reason: str | None = None
    place: str | None = None  # with --cluster: where and as whom this node meets the others
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def wants(self, path: str) -> bool:
        """Whether --include and --exclude admit ``path``.

        An empty --include takes everything; --exclude wins.
        """
        included = not self.include or _matches(path, self.include)
        return included and not _matches(path, self.exclude)

    def wants_whole(self, path: str) -> bool:
        """Whether --whole says that all of the file will be needed."""
        return _matches(path, self.whole)

    def to_json(self) -> str:
        """The values (without their origins) for the service, as one line of JSON."""
        return jsontext.dumps(self._values())

    def _values(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "origins"}

    def spacing_bytes(self) -> int:
        """The least distance between two checkpoints: --distance where the user has chosen one."""
        return SPACING_BYTES if self.distance_bytes is None else self.distance_bytes

    def fingerprint(self) -> int:
        """A hash of 32 bits, never 0, of the values that the service depends on."""
        values = self._values()
        values["engine"] = self.engine_asked or self.engine
        for name in _OF_THE_LAUNCHER:
            del values[name]
        return zlib.crc32(jsontext.dumps(values).encode()) or 1

    @classmethod
    def from_json(cls, text: str) -> Config:
        """The inverse of to_json(); raises UffdPrefetchError (exit 2) for anything else."""
        import json

        try:
            values = json.loads(text)
            for name in ("include", "exclude", "whole", "share"):
                if name in values:
                    values[name] = tuple(values[name])
            return validate(cls(**values))
        except (ValueError, TypeError) as error:
            raise usage_error(f"not a configuration in JSON: {error}") from None

    def environment(self) -> dict[str, str]:
        """The UFFDPREFETCH_* variables that pass the options to a nested wrap; an explicit value
        also where it is the default, else a file could override it there."""
        variables = {}
        for option in OPTIONS:
            value = getattr(self, option.field)
            made = self.origins.get(option.field, "default") != "default"
            if value != option.default or made:
                variables[option.variable] = option.format(value)
        return variables


# ---- the options --------------------------------------------------------------------------------


def _one_of(*words: str) -> Callable[[str], str]:
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
    implied: str | None = None  # what the option means without a value

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper().replace("-", "_")

    @property
    def default(self) -> Any:
        return getattr(Config, self.field)

    @property
    def is_flag(self) -> bool:
        return self.parse is _parse_bool

    @property
    def is_list(self) -> bool:
        return self.parse is _parse_globs


OPTIONS = (
    Option("output", "output", str,
           "summary file: %%h host, %%p pid, %%j job, %%r rank, %%q{VAR} variable, with"
           " .summary.json appended; /dev/null: none (default: the last 50 are kept in"
           " $XDG_STATE_HOME/uffdprefetch, where `uffdprefetch summary` finds them)", "PATTERN",
           "-o", format=lambda value: value or ""),
    Option("force", "force", _parse_bool, "overwrite an existing summary file", short="-f"),
    Option("engine", "engine", _one_of(*ENGINES),
           "cache: checkpoints over the mapping, data in the page cache (default);"
           " pool: data in memory of our own, read once per node, at most --budget (at least 1MiB;"
           " default with --cluster);"
           " off: touch nothing in the job", "|".join(ENGINES)),
    Option("evict", "evict", _one_of(*EVICTIONS),
           "what leaves a full pool: cyclic: keep a part of the file over the epochs (default);"
           " lru: what was touched longest ago", "|".join(EVICTIONS)),
    Option("huge_pages", "huge-pages", _one_of(*HUGE_PAGES),
           "the pool's memory in huge pages where the kernel gives them to shared memory (auto,"
           " default) or never (off)", "|".join(HUGE_PAGES)),
    Option("policy", "policy", _one_of(*POLICIES),
           "auto: measure, then decide (default); fixed: --size and --distance as they are;"
           " stride: ranks skip each other's records, prefetch only their own;"
           " plan: follow orders that are known, else prefetch nothing;"
           " none: watch, prefetch nothing", "|".join(POLICIES)),
    Option("size_bytes", "size", parse_size,
           "bytes prefetched at once with --policy fixed (default: 50MiB)", "SIZE",
           format=format_size_exact),
    Option("distance_bytes", "distance", _unless("auto", parse_size),
           "least bytes between the checkpoints of a mapping, and the step in which a reader is"
           f" followed (default: {format_size_exact(SPACING_BYTES)}, and measured; with --policy"
           f" fixed {format_size_exact(FIXED_DISTANCE_BYTES)}). Neither known orders nor the pool"
           " ask for it: their readers are followed record by record, and in steps of 4MiB",
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
    Option("meet", "meet", os.path.abspath,
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
           "leave smaller mappings alone (default: 16MiB)", "SIZE", format=format_size_exact),
    Option("plan", "plan", os.path.abspath,
           "the order in which each rank reads its records (docs/plans.md; `uffdprefetch plan FILE`"
           " checks one)", "FILE"),
    Option("torch", "torch", _one_of(*TORCH),
           "follow the order of PyTorch DataLoaders, where it can be told (auto, default;"
           " docs/pytorch.md; debug: and say on stderr why not), or leave PyTorch alone (off)",
           "|".join(TORCH)),
    Option("trace", "trace", str,
           "record what the kernel and the service see into this file (tokens as in -o;"
           " `uffdprefetch trace FILE` shows it)", "FILE"),
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
_BY_KEY = {option.key: option for option in OPTIONS}
_BY_SHORT = {option.short: option for option in OPTIONS if option.short}
_BY_VARIABLE = {option.variable: option for option in OPTIONS}


#: Titles of the help, and the options under each.
GROUPS = (
    ("what is served", ("include", "exclude", "min-size", "whole", "plan", "torch")),
    (
        "how",
        (
            *("engine", "policy", "budget", "max-rate", "evict", "huge-pages"),
            *("size", "distance", "threshold"),
        ),
    ),
    ("many nodes", ("cluster", "meet", "share", "launcher", "serve-cpu")),
    (
        "what is said and written",
        ("output", "force", "quiet", "verbose", "live", "interval", "trace"),
    ),
    ("besides", ("strict", "ownlock")),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option, and --config, to ``parser``; options without a value stay unset."""
    import argparse

    groups = {
        key: group
        for title, keys in GROUPS
        for group in [parser.add_argument_group(title)]
        for key in keys
    }
    for option in OPTIONS:
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
    groups["live"].add_argument(
        "--headless", dest="live", action="store_const", const="0", default=argparse.SUPPRESS,
        help="the opposite of --live, where a file or a variable asks for it",
    )  # fmt: skip
    groups["strict"].add_argument(
        "--config", dest="config_file", default=argparse.SUPPRESS, metavar="FILE",
        help="read this file instead of ./uffdprefetch.toml and the one in $XDG_CONFIG_HOME",
    )  # fmt: skip


def options_end(words: Sequence[str]) -> int:
    """Where the options of `wrap` end and its command begins, if it is not told by ``--``: at the
    first word that is neither an option nor the value of one (len(words): nowhere)."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        takes = _takes_the_next(words[at], words[at + 1 : at + 2])
        at += 1 + takes
    return at


def _takes_the_next(word: str, following: Sequence[str]) -> bool:
    """Whether an option's value is the word after it. ``following``: that, if there is one."""
    if not following:
        return False
    if word.startswith("--"):
        key, given, _ = word.partition("=")
        option = _BY_KEY.get(key[2:])
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
        option = _BY_SHORT.get(word) or (_BY_KEY.get(key[2:]) if key.startswith("--") else None)
        if option is None or (given and option.is_flag):
            return None
        if option.is_flag:
            value = "1"
        elif not given:
            alone = not rest or rest[0].startswith("-")
            if alone and option.implied is None:
                return None
            value = option.implied or "" if alone else rest.pop(0)
        if option.is_list:
            values.setdefault(option.field, []).append(value)
        else:
            values[option.field] = value
    return values


def _parsed(option: Option, text: str, origin: str) -> Any:
    try:
        return option.parse(text)
    except UffdPrefetchError as error:
        raise usage_error(f"{origin}: {error.message}") from None


def _from_command_line(args: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = args.get(option.field)
        if given is None:
            continue
        # On the command line a glob may contain a colon: it is no separator there.
        values[option.field] = (
            tuple(given) if option.is_list else _parsed(option, given, f"--{option.key}")
        )
    return values


def _unknown(name: str, known: Iterable[str], where: str) -> UffdPrefetchError:
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return usage_error(f"{where}: unknown key {name!r}, the nearest is {near[0]!r}")


def _of_environment(environ: Mapping[str, str]) -> list[str]:
    """The variables that are options, or are called as if they were."""
    return [
        name
        for name in sorted(environ)
        if name.startswith(PREFIX)
        and name not in INTERNAL_VARIABLES
        and not name.startswith(PREFIX + "TEST_")  # switches of the test suite
    ]


def _from_variable(name: str, text: str) -> dict[str, Any]:
    if name not in _BY_VARIABLE:
        raise _unknown(name, [*_BY_VARIABLE, *INTERNAL_VARIABLES], "environment")
    option = _BY_VARIABLE[name]
    return {option.field: _parsed(option, text, name)}


def load_toml(path: str, what: str) -> dict[str, Any]:
    """The tables of a TOML file; ``what`` names its kind in the error (exit 2)."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise usage_error(f"cannot read {what} {path}: {error.strerror}") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError both are
        raise usage_error(f"{path}: not TOML: {error}") from None


def _from_key(path: str, key: str, value: Any) -> dict[str, Any]:
    """Of a configuration file."""
    option = _BY_KEY.get(key.replace("_", "-"))
    if option is None:
        raise _unknown(key, _BY_KEY, path)
    origin = f"{path}: {key}"
    if option.is_list:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(glob, str) for glob in value):
            raise usage_error(f"{origin}: wants a list of globs, got {value!r}")
        return {option.field: tuple(value)}
    if option.is_flag:
        if not isinstance(value, bool):
            raise usage_error(f"{origin}: wants true or false, got {value!r}")
        return {option.field: value}
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return {option.field: _parsed(option, str(value), origin)}
    raise usage_error(f"{origin}: wants a string or a number, got {value!r}")


def _files(environ: Mapping[str, str], cwd: str, explicit: str | None) -> list[str]:
    """The configuration files to read, weakest first."""
    if explicit is not None:
        return [os.path.join(cwd, explicit)]
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or "/", ".config")
    candidates = [
        os.path.join(home, "uffdprefetch", "config.toml"),
        os.path.join(cwd, "uffdprefetch.toml"),
    ]
    return [path for path in candidates if os.path.exists(path)]


def _read_into(tables: dict[str, Any], path: str) -> dict[str, Any]:
    """No option yet."""
    tables.update(load_toml(path, "configuration"))
    return {}


def _report(wrong: Sequence[UffdPrefetchError], *, strict: bool) -> None:
    if wrong and strict:
        raise wrong[0]
    if wrong:
        from uffdprefetch.base.messages import say

        for error in wrong:
            say(f"{error.message}; ignored")


def load(
    args: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> Config:
    """Build the Config of a command.

    ``args`` is vars() of a namespace that add_options() filled (others' keys are ignored).
    Raises UffdPrefetchError with exit code 2 and one clear line for what is wrong on the command
    line or in a file that it names. What is wrong elsewhere may be old, or somebody else's: it is
    ignored, with a line, unless --strict.
    """
    args = args or {}
    environ = os.environ if environ is None else environ
    cwd = os.getcwd() if cwd is None else cwd
    explicit = args.get("config_file") or environ.get(PREFIX + "CONFIG") or None
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    wrong: list[UffdPrefetchError] = []
    strong = ("command line", _named_on_the_command_line(args, cwd))

    def take(origin: str, read: Callable[..., dict[str, Any]], *what: Any) -> None:
        try:
            layer = read(*what)
        except UffdPrefetchError as error:
            if origin in strong:
                raise
            wrong.append(error)
        else:
            values.update(layer)
            origins.update(dict.fromkeys(layer, origin))

    for path in _files(environ, cwd, explicit):
        tables: dict[str, Any] = {}
        take(path, _read_into, tables, path)
        for key, value in tables.items():
            take(path, _from_key, path, key, value)
    for name in _of_environment(environ):
        take(name, _from_variable, name, environ[name])
    take("command line", _from_command_line, args)
    _leave_out_what_does_not_fit(values, origins, strong, wrong)
    _report(wrong, strict=values.get("strict", False))
    values["config_file"] = explicit
    return _whole(values, origins)


def _named_on_the_command_line(args: Mapping[str, Any], cwd: str) -> str | None:
    """The configuration file, as origins have it."""
    return os.path.join(cwd, args["config_file"]) if args.get("config_file") else None


def _whole(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    """With what follows from the values that were given. Raises UffdPrefetchError."""
    values, origins = dict(values), dict(origins)
    if values.get("policy") == "fixed" and values.get("distance_bytes") is None:
        values["distance_bytes"] = FIXED_DISTANCE_BYTES
        origins["distance_bytes"] = "default of policy fixed"
    if values.get("cluster") is not None and "engine" not in values:
        values["engine"], origins["engine"] = "pool", "default of cluster"
    for option in OPTIONS:
        origins.setdefault(option.field, "default")
    return validate(Config(**values, origins=origins))


def _leave_out_what_does_not_fit(
    values: dict[str, Any],
    origins: dict[str, str],
    strong: Sequence[str | None],
    wrong: list[UffdPrefetchError],
) -> None:
    """Values make sense together or not. Of those that do not, one goes that the command line has
    nothing to do with: without which the others fit, else the last one."""

    def error_of(some: Mapping[str, Any]) -> UffdPrefetchError | None:
        try:
            _whole(some, origins)
        except UffdPrefetchError as error:
            return error
        return None

    while (error := error_of(values)) is not None:
        weak = [name for name in reversed(values) if origins[name] not in strong]
        if not weak:
            raise error
        fits = (n for n in weak if not error_of({k: v for k, v in values.items() if k != n}))
        left_out = next(fits, weak[0])
        wrong.append(error)
        del values[left_out], origins[left_out]


def validate(config: Config) -> Config:
    """Return ``config`` if its values make sense together, else raise (exit 2)."""

    def check(condition: bool, message: str) -> None:
        if not condition:
            raise usage_error(message)

    for name, words in (
        ("engine", ENGINES),
        ("policy", POLICIES),
        ("evict", EVICTIONS),
        ("huge_pages", HUGE_PAGES),
        ("torch", TORCH),
    ):
        value = getattr(config, name)
        check(value in words, f"{name} {value!r} is none of {', '.join(words)}")
    check(0.0 < config.serve_cpu <= 4096.0, f"serve-cpu {config.serve_cpu} is no number of cores")
    check(
        config.budget_bytes >= PAGE_BYTES,
        f"budget {config.budget_bytes} is less than a page: give it a unit, as in --budget 4GiB",
    )
    check(0.0 < config.threshold <= 1.0, f"threshold {config.threshold} is not in 0..1")
    check(
        config.size_bytes >= PAGE_BYTES,
        f"size {config.size_bytes} is less than a page ({PAGE_BYTES} bytes)",
    )
    check(
        config.policy != "fixed" or config.budget_bytes >= config.size_bytes,
        f"budget {format_size_exact(config.budget_bytes)} is less than size"
        f" {format_size_exact(config.size_bytes)}: raise --budget or lower --size",
    )
    distance = config.distance_bytes
    if distance is not None:
        check(
            distance >= PAGE_BYTES and distance % PAGE_BYTES == 0,
            f"distance {distance} is not a multiple of the page ({PAGE_BYTES} bytes)",
        )
    rate = config.max_rate_bytes_per_second
    check(
        rate is None or rate >= MIB,
        f"max-rate {rate} is below 1 MiB/s: to read nothing ahead use --policy none",
    )
    check(
        config.interval_seconds >= 0.1,
        f"interval {config.interval_seconds:g} s is too short: at least 100ms",
    )
    check(config.output != "", "output is empty: give a pattern such as uffdprefetch.%j.%r")
    return config


#: Options that only do something beside another one, and whether it is there.
_NEED: tuple[tuple[tuple[str, ...], str, Callable[[Config], bool]], ...] = (
    (("size", "threshold"), "--policy fixed", lambda config: config.policy == "fixed"),
    (("evict", "huge-pages"), "--engine pool", lambda config: config.engine == "pool"),
    (
        ("meet", "share", "launcher", "serve-cpu"),
        "--cluster",
        lambda config: config.cluster is not None,
    ),
    (("interval",), "--live", lambda config: config.live),
)


def without_effect(config: Config) -> list[str]:
    """A line for each option of the command line that does nothing as it stands."""
    return [
        f"--{key} does nothing without {other}"
        for keys, other, holds in _NEED
        if not holds(config)
        for key in keys
        if config.origins.get(_BY_KEY[key].field) == "command line"
    ]


def describe(config: Config) -> list[tuple[str, str, str]]:
    """(key, value, origin) of each option, for ``doctor --show-config``."""
    return [
        (option.key, option.format(getattr(config, option.field)), config.origins[option.field])
        for option in OPTIONS
    ]


def fall_back(config: Config, why: str) -> Config:
    """The same run with the engine with the fewest requirements, and the reason."""
    return Config(
        **{**vars(config), "engine": "cache", "engine_asked": config.engine, "engine_reason": why}
    )


def why_fallen_back(config: Config) -> str:
    """The reason of a fallback, in one line."""
    return f"engine {config.engine_asked}: {config.engine_reason}; using the cache engine"
