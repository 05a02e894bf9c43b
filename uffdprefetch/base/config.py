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
    from collections.abc import Iterable, Mapping
    from typing import Any

ENGINES = ("cache", "pool", "off")
EVICTIONS = ("cyclic", "lru")
HUGE_PAGES = ("auto", "off")
TORCH = ("auto", "off", "debug")
POLICIES = ("auto", "fixed", "stride", "plan", "none")
#: Under which something is read ahead on a guess.
GUESSING = ("auto", "stride")
#: Default distance of `--policy fixed`: a checkpoint per 8 MiB ([Haderbache] section 4).
FIXED_DISTANCE_BYTES = 8 * MIB
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
        return FIXED_DISTANCE_BYTES if self.distance_bytes is None else self.distance_bytes

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
    ):
        value = getattr(config, name)
        what = f"{value!r} is none of {', '.join(words)}"
        check(value in words, name.replace("_", "-"), what)
    cores = config.serve_cpu
    check(0.0 < cores <= 4096.0, "serve-cpu", f"{cores:g} is no number of cores")
    check(
        config.budget_bytes >= PAGE_BYTES,
        "budget",
        f"{config.budget_bytes} is less than a page: give it a unit, as in 4GiB",
        "budget_bytes",
    )
    check(0.0 < config.threshold <= 1.0, "threshold", f"{config.threshold} is not in 0..1")
    check(
        config.size_bytes >= PAGE_BYTES,
        "size",
        f"{config.size_bytes} is less than a page ({PAGE_BYTES} bytes)",
        "size_bytes",
    )
    check(
        config.policy != "fixed" or config.budget_bytes >= config.size_bytes,
        "budget",
        f"{format_size_exact(config.budget_bytes)} is less than --size"
        f" {format_size_exact(config.size_bytes)}: raise --budget or lower --size",
        "budget_bytes",
    )
    distance = config.distance_bytes
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
        config.interval_seconds >= 0.1,
        "interval",
        f"{config.interval_seconds:g} s is too short: at least 100ms",
        "interval_seconds",
    )
    check(config.output != "", "output", "is empty: give a pattern such as uffdprefetch.%j.%r")
    return config


def _written(config: Config, key: str, name: str) -> str:
    """How an option was written where its value is from: on the command line, as a variable, as a
    key of a file."""
    origin = config.origins.get(name, "")
    if origin.startswith(PREFIX):
        return f"{origin}:"
    return f"{origin}: {key}:" if "/" in origin else f"--{key}"


def fall_back(config: Config, why: str) -> Config:
    """The same run with the engine with the fewest requirements, and the reason."""
    return Config(
        **{**vars(config), "engine": "cache", "engine_asked": config.engine, "engine_reason": why}
    )


def why_fallen_back(config: Config) -> str:
    """The reason of a fallback, in one line."""
    return f"engine {config.engine_asked}: {config.engine_reason}; using the cache engine"
