# SPDX-License-Identifier: Apache-2.0
"""Where the values of the options come from.

Precedence: command line > environment > ./uffdprefetch.toml >
$XDG_CONFIG_HOME/uffdprefetch/config.toml > default (with ``--config F``, F takes the place of both
files).
"""

from __future__ import annotations

import os
import sys

from uffdprefetch.base.config import FIXED_DISTANCE_BYTES, PREFIX, Config, validate
from uffdprefetch.base.errors import UffdPrefetchError, named, usage_error
from uffdprefetch.base.options import BY_KEY, BY_VARIABLE, OPTIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

#: Our variables that are no options: set by wrap for the job and the service, or test switches.
INTERNAL_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("RUN", "RUNG", "DISABLE", "SOCKET", "RUNDIR"),
        *("SERVE_CONFIG", "KEEP_ADVICE", "CONFIG", "LOCKDIR", "LISTEN", "START_LOG"),
        *("LUSTRE", "SLURMBED", "CLUSTER_RUN", "CLUSTER_NODE", "CLUSTER_NODES", "GROUP"),
    )
)


def _from_command_line(args: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = args.get(option.field)
        if given is None:
            continue
        # On the command line a glob may contain a colon: it is no separator there.
        values[option.field] = (
            tuple(given) if option.is_list else named(f"--{option.key}", option.parse, given)
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
    if name not in BY_VARIABLE:
        raise _unknown(name, [*BY_VARIABLE, *INTERNAL_VARIABLES], "environment")
    option = BY_VARIABLE[name]
    return {option.field: named(name, option.parse, text)}


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
    option = BY_KEY.get(key.replace("_", "-"))
    if option is None:
        raise _unknown(key, BY_KEY, path)
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
        return {option.field: named(origin, option.parse, str(value))}
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
    cwd = _here() if cwd is None else cwd
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


def _here() -> str:
    """The working directory; by another name where it has been removed, in which a program may run
    all the same."""
    try:
        return os.getcwd()
    except OSError:
        return "/proc/self/cwd"


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
    return validate(Config.of(origins, **values))


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
