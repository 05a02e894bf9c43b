# SPDX-License-Identifier: Apache-2.0
"""What a run is asked to do: the values of its options, in one record.

How each option is written is in options.py, where its value comes from in sources.py.
"""

from __future__ import annotations

import os
import zlib

from uffdprefetch.base import jsontext
from uffdprefetch.base.errors import usage_error
from uffdprefetch.base.record import field, record
from uffdprefetch.base.units import MIB, PAGE_BYTES, format_size_exact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

ENGINES = ("cache", "pool", "off")
EVICTIONS = ("cyclic", "lru")
HUGE_PAGES = ("auto", "off")
TORCH = ("auto", "off", "debug")
READS = ("auto", "off")
POLICIES = ("auto", "fixed", "stride", "plan", "none")
#: Under which something is read ahead on a guess.
GUESSING = ("auto", "stride")
#: Default distance of `--policy fixed`: a checkpoint per 8 MiB ([Haderbache] section 4).
FIXED_DISTANCE_BYTES = 8 * MIB
#: Least size of a pool, sixteen chunks: with less, a few threads at different positions keep
#: evicting each other's. (UFFDPREFETCH_TEST_POOL_LEAST overrides it in tests.)
POOL_LEAST_BYTES = MIB

#: Threads of a replay: more than any server has requests of one client under way.
LEARN_DEPTH_MOST = 256

PREFIX = "UFFDPREFETCH_"
#: Tells the preload object where the ranks' own lock files go (`--ownlock`). Not the option's own
#: variable, which hands the choice to a nested wrap.
LOCKS_VARIABLE = PREFIX + "LOCKDIR"
#: Tells a service its options, Config.to_json().
SERVED_VARIABLE = PREFIX + "SERVE_CONFIG"


def _matches(path: str, globs: Iterable[str]) -> bool:
    """Whether one of them fits. A glob with a slash is matched against the whole path, one without
    against the last part."""
    import fnmatch

    name = os.path.basename(path)
    return any(fnmatch.fnmatchcase(path if "/" in g else name, g) for g in globs)


@record(frozen=True)
class FileOptions:
    """Which files: globs, and the size below which they are left to the kernel; ``reads``: whether
    those that are read by calls are, too."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    min_size_bytes: int = 16 * MIB
    reads: str = "auto"

    def wants(self, path: str) -> bool:
        """Whether --include and --exclude admit ``path``.

        An empty --include takes everything; --exclude wins.
        """
        included = not self.include or _matches(path, self.include)
        return included and not _matches(path, self.exclude)

    def wants_whole(self, path: str) -> bool:
        """Whether --whole says that all of the file will be needed."""
        return _matches(path, self.whole)


@record(frozen=True)
class FixedOptions:
    """Of `--policy fixed`: its window, and its checkpoints."""

    size_bytes: int = 50 * MIB
    distance_bytes: int | None = None
    threshold: float = 0.75


@record(frozen=True)
class PoolOptions:
    """Of `--engine pool`."""

    evict: str = "cyclic"
    huge_pages: str = "auto"
    spill: str | None = None  # DIR[:SIZE] (base/spill_place.py)


@record(frozen=True)
class ClusterOptions:
    """Of `--cluster`. ``nodes``: how many share; 0: as many as the launcher says, None: none do."""

    nodes: int | None = None
    meet: str | None = None
    share: tuple[str, ...] = ()
    launcher: str | None = None
    serve_cpu: float = 1.0
    place: str | None = None  # where and as whom this node meets the others


@record(frozen=True)
class OrderOptions:
    """Where orders come from: a plan file, the hook for DataLoaders."""

    plan: str | None = None
    torch: str = "auto"


@record(frozen=True)
class WrapOptions:
    """What does not concern the service, but who starts the job: what is told, and where to."""

    trace: str | None = None
    ownlock: bool = False
    strict: bool = False
    quiet: bool = False
    verbose: bool = False
    live: bool = False
    interval_seconds: float = 10.0
    output: str | None = None  # None: in the user's state directory
    force: bool = False


@record(frozen=True)
class LearnOptions:
    """Of `--learn`. ``name``: of the start profile; "": the program's own, None: nothing is learned
    or replayed. ``depth``: requests of a replay at a time; None: as its file system likes.
    ``directory``: of profiles that are read, and never written; ``of``: what starts, for people;
    ``program``: its real path: the launcher says them."""

    name: str | None = None
    depth: int | None = None
    budget_bytes: int = 1 << 30
    directory: str | None = None
    of: str = ""
    program: str = ""


@record(frozen=True)
class ConfigSource:
    """Where the values are from: the file that was named, of each value its origin; of a run that
    fell back the requested engine, and why."""

    config_file: str | None = None
    engine_asked: str | None = None
    engine_reason: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


#: The values by their names in JSON, in that order, and where each stands in a Config.
_WHERE = {
    "engine": "engine",
    "evict": "pool.evict",
    "huge_pages": "pool.huge_pages",
    "spill": "pool.spill",
    "policy": "policy",
    "size_bytes": "fixed.size_bytes",
    "distance_bytes": "fixed.distance_bytes",
    "threshold": "fixed.threshold",
    "budget_bytes": "budget_bytes",
    "max_rate_bytes_per_second": "max_rate_bytes_per_second",
    "include": "files.include",
    "exclude": "files.exclude",
    "whole": "files.whole",
    "cluster": "cluster.nodes",
    "meet": "cluster.meet",
    "share": "cluster.share",
    "launcher": "cluster.launcher",
    "serve_cpu": "cluster.serve_cpu",
    "min_size_bytes": "files.min_size_bytes",
    "reads": "files.reads",
    "plan": "orders.plan",
    "torch": "orders.torch",
    "learn": "learn.name",
    "learn_depth": "learn.depth",
    "learn_budget_bytes": "learn.budget_bytes",
    "learn_dir": "learn.directory",
    "learn_of": "learn.of",
    "learn_program": "learn.program",
    "trace": "wrap.trace",
    "ownlock": "wrap.ownlock",
    "strict": "wrap.strict",
    "quiet": "wrap.quiet",
    "verbose": "wrap.verbose",
    "live": "wrap.live",
    "interval_seconds": "wrap.interval_seconds",
    "output": "wrap.output",
    "force": "wrap.force",
    "config_file": "source.config_file",
    "engine_asked": "source.engine_asked",
    "engine_reason": "source.engine_reason",
    "place": "cluster.place",
}
#: Names of the values that do not concern the service; and of `--learn`: a start has one profile,
#: the first launcher's.
_OF_THE_LAUNCHER = frozenset(
    name for name, where in _WHERE.items() if where.startswith(("wrap.", "source.", "learn."))
) | {"place"}


@record(frozen=True)
class Config:
    """All options of a run, by whom they are for; sizes in bytes."""

    engine: str = "cache"
    policy: str = "auto"
    budget_bytes: int = 4 << 30
    max_rate_bytes_per_second: int | None = None
    files: FileOptions = FileOptions()
    fixed: FixedOptions = FixedOptions()
    pool: PoolOptions = PoolOptions()
    cluster: ClusterOptions = ClusterOptions()
    orders: OrderOptions = OrderOptions()
    learn: LearnOptions = LearnOptions()
    wrap: WrapOptions = WrapOptions()
    source: ConfigSource = field(default_factory=ConfigSource)

    @classmethod
    def of(cls, origins: Mapping[str, str] | None = None, **values: Any) -> Config:
        """Of values by their names in JSON; ``origins``: where they are from, by the same names.
        Raises TypeError for another name."""
        parts: dict[str, dict[str, Any]] = {"source": {"origins": origins or {}}}
        for name, value in values.items():
            if name not in _WHERE:
                raise TypeError(f"Config has no field {name!r}")
            part, _, one = _WHERE[name].rpartition(".")
            parts.setdefault(part, {})[one] = value
        own = parts.pop("", {})
        return cls(**own, **{part: _PARTS[part](**told) for part, told in parts.items()})

    def but(self, **values: Any) -> Config:
        """The same with other values, by their names in JSON."""
        return Config.of(self.source.origins, **{**self.values(), **values})

    def value(self, name: str) -> Any:
        """By its name in JSON."""
        found: Any = self
        for part in _WHERE[name].split("."):
            found = getattr(found, part)
        return found

    def values(self) -> dict[str, Any]:
        """All of them, without their origins, by their names in JSON."""
        return {name: self.value(name) for name in _WHERE}

    def to_json(self) -> str:
        """The values (without their origins) for the service, as one line of JSON."""
        return jsontext.dumps(self.values())

    @property
    def engine_asked(self) -> str:
        """The engine that was asked for."""
        return self.source.engine_asked or self.engine

    @property
    def guesses(self) -> bool:
        """Whether something is read ahead on a guess."""
        return self.policy in GUESSING

    @property
    def lays_checkpoints(self) -> bool:
        """Whether checkpoints are laid over mappings: the method of [Haderbache]. Other policies
        follow readers by page tables, which tell as much (docs/benchmarks.md)."""
        return self.policy == "fixed" and self.engine != "off"

    @property
    def keeps_copies(self) -> bool:
        """Whether pages of ours lie in the place of a file's, which who writes the file does not
        change: checkpoints, and the pool's memory."""
        return self.lays_checkpoints or self.engine == "pool"

    @property
    def spacing_bytes(self) -> int:
        """The least distance between two checkpoints of a mapping; 0: none are laid."""
        if not self.lays_checkpoints:
            return 0
        distance = self.fixed.distance_bytes
        return FIXED_DISTANCE_BYTES if distance is None else distance

    def fingerprint(self) -> int:
        """A hash of 32 bits, never 0, of the values that the service depends on."""
        values = {n: value for n, value in self.values().items() if n not in _OF_THE_LAUNCHER}
        values["engine"] = self.engine_asked
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
            return validate(cls.of(**values))
        except (ValueError, TypeError) as error:
            raise usage_error(f"not a configuration in JSON: {error}") from None


_PARTS: dict[str, Callable[..., Any]] = {
    "files": FileOptions, "fixed": FixedOptions, "pool": PoolOptions, "cluster": ClusterOptions,
    "orders": OrderOptions, "learn": LearnOptions, "wrap": WrapOptions, "source": ConfigSource,
}  # fmt: skip


def validate(config: Config) -> Config:
    """Return ``config`` if its values make sense together, else raise (exit 2)."""

    def check(condition: bool, key: str, what: str, name: str | None = None) -> None:
        """``what`` is wrong with the option ``key``, of which ``name`` is the field."""
        if not condition:
            raise usage_error(f"{_written(config, key, name or key.replace('-', '_'))} {what}")

    for name, words in (
        ("engine", ENGINES),
        ("policy", POLICIES),
        ("evict", EVICTIONS),
        ("huge_pages", HUGE_PAGES),
        ("torch", TORCH),
        ("reads", READS),
    ):
        value = config.value(name)
        what = f"{value!r} is none of {', '.join(words)}"
        check(value in words, name.replace("_", "-"), what)
    cores = config.cluster.serve_cpu
    check(0.0 < cores <= 4096.0, "serve-cpu", f"{cores:g} is no number of cores")
    check(
        config.budget_bytes >= PAGE_BYTES,
        "budget",
        f"{config.budget_bytes} is less than a page ({PAGE_BYTES} bytes): say 4GiB",
        "budget_bytes",
    )
    check(
        0.0 < config.fixed.threshold <= 1.0, "threshold", f"{config.fixed.threshold} is not in 0..1"
    )
    check(
        config.fixed.size_bytes >= PAGE_BYTES,
        "size",
        f"{config.fixed.size_bytes} is less than a page ({PAGE_BYTES} bytes)",
        "size_bytes",
    )
    check(
        config.policy != "fixed" or config.budget_bytes >= config.fixed.size_bytes,
        "budget",
        f"{format_size_exact(config.budget_bytes)} is less than --size"
        f" {format_size_exact(config.fixed.size_bytes)}: raise --budget or lower --size",
        "budget_bytes",
    )
    distance = config.fixed.distance_bytes
    if distance is not None:
        check(
            distance >= PAGE_BYTES and distance % PAGE_BYTES == 0,
            "distance",
            f"{distance} is not a multiple of the page ({PAGE_BYTES} bytes)",
            "distance_bytes",
        )
    rate = config.max_rate_bytes_per_second
    check(
        rate is None or rate >= MIB,
        "max-rate",
        f"{rate} is below 1 MiB/s: to read nothing ahead use --policy none",
        "max_rate_bytes_per_second",
    )
    check(
        config.wrap.interval_seconds >= 0.1,
        "interval",
        f"{config.wrap.interval_seconds:g} s is too short: at least 100ms",
        "interval_seconds",
    )
    depth = config.learn.depth
    check(
        depth is None or 1 <= depth <= LEARN_DEPTH_MOST,
        "learn-depth",
        f"{depth} is not in 1..{LEARN_DEPTH_MOST}",
    )
    check(
        config.learn.budget_bytes >= PAGE_BYTES,
        "learn-budget",
        f"{config.learn.budget_bytes} is less than a page ({PAGE_BYTES} bytes): say 1GiB",
        "learn_budget_bytes",
    )
    check(config.wrap.output != "", "output", "is empty: give a pattern such as uffdprefetch.%j.%r")
    return config


def _written(config: Config, key: str, name: str) -> str:
    """How an option was written where its value is from: on the command line, as a variable, as a
    key of a file."""
    origin = config.source.origins.get(name, "")
    if origin.startswith(PREFIX):
        return f"{origin}:"
    return f"{origin}: {key}:" if "/" in origin else f"--{key}"


def fall_back(config: Config, why: str) -> Config:
    """The same run with the engine with the fewest requirements, and the reason."""
    return config.but(engine="cache", engine_asked=config.engine, engine_reason=why)


def why_fallen_back(config: Config) -> str:
    """The reason of a fallback, in one line."""
    source = config.source
    return f"engine {source.engine_asked}: {source.engine_reason}; using the cache engine"
