# SPDX-License-Identifier: Apache-2.0
"""Where a setting comes from, which one wins, and what a wrong one says."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from uffdprefetch.base import options, sources
from uffdprefetch.base.config import Config
from uffdprefetch.base.errors import UffdPrefetchError


def parse(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    return vars(parser.parse_args(list(words)))


class Machine:
    """A home with a configuration directory and a current directory, both empty at first."""

    def __init__(self, root: Path) -> None:
        self.cwd = root / "job"
        self.cwd.mkdir()
        self.user_file = root / "xdg" / "uffdprefetch" / "config.toml"
        self.user_file.parent.mkdir(parents=True)
        self.local_file = self.cwd / "uffdprefetch.toml"
        self.environ = {"XDG_CONFIG_HOME": str(root / "xdg"), "HOME": str(root)}

    def load(self, *words: str, **variables: str) -> Config:
        return sources.load(parse(*words), {**self.environ, **variables}, str(self.cwd))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_defaults(machine: Machine) -> None:
    loaded = machine.load()
    assert loaded == Config()
    assert (loaded.engine, loaded.policy, loaded.fixed.size_bytes) == ("cache", "auto", 50 << 20)
    assert (loaded.fixed.distance_bytes, loaded.budget_bytes) == (None, 4 << 30)
    assert set(loaded.source.origins.values()) == {"default"}


def test_precedence_and_origins(machine: Machine) -> None:
    machine.user_file.write_text('size = "10MiB"\nbudget = "1GiB"\npolicy = "fixed"\nstrict = true')
    machine.local_file.write_text('size = "20MiB"\nbudget = "2GiB"\nmin-size = 4096\n')
    loaded = machine.load("--size", "40MiB", UFFDPREFETCH_SIZE="30MiB", UFFDPREFETCH_BUDGET="3GiB")
    assert loaded.fixed.size_bytes == 40 << 20
    assert loaded.budget_bytes == 3 << 30
    assert loaded.files.min_size_bytes == 4096
    assert loaded.wrap.strict is True
    origins = loaded.source.origins
    assert origins["size_bytes"] == "command line"
    assert origins["budget_bytes"] == "UFFDPREFETCH_BUDGET"
    assert origins["min_size_bytes"] == str(machine.local_file)
    assert origins["policy"] == str(machine.user_file)
    assert origins["threshold"] == "default"


def test_an_explicit_file_takes_the_place_of_both(machine: Machine, tmp_path: Path) -> None:
    machine.user_file.write_text("strict = true")
    machine.local_file.write_text("quiet = true")
    (machine.cwd / "mine.toml").write_text("verbose = true")
    loaded = machine.load("--config", "mine.toml")
    assert (loaded.wrap.strict, loaded.wrap.quiet, loaded.wrap.verbose) == (False, False, True)
    assert machine.load(UFFDPREFETCH_CONFIG="mine.toml").wrap.verbose
    with pytest.raises(UffdPrefetchError, match=r"cannot read configuration .*none.toml: No such"):
        machine.load("--config", "none.toml")


def test_every_option_has_all_three_spellings(machine: Machine) -> None:
    given = {
        "output": "x.%r", "force": "1", "engine": "off", "policy": "none", "size": "1MiB",
        "distance": "4MiB", "threshold": "0.5", "budget": "1GiB", "max-rate": "300MB/s",
        "include": "*.mdb", "exclude": "lock*", "whole": "*.st",
        "min-size": "1MiB",
        "trace": "seen", "ownlock": "1", "live": "1", "interval": "2.5",
        "strict": "1", "quiet": "1", "verbose": "1", "evict": "lru", "huge-pages": "off",
        "plan": "/order.json", "torch": "off", "cluster": "4", "meet": "/shared", "share": "*.bin",
        "launcher": "srun --mpi=pmi2", "serve-cpu": "0.5", "reads": "off", "learn": "train",
        "learn-depth": "8", "learn-budget": "2GiB", "learn-dir": "/profiles",
            "spill": "/disk:3GiB",
    }  # fmt: skip
    assert set(given) == {option.key for option in options.OPTIONS}
    words: list[str] = []
    toml = ""
    for option in options.OPTIONS:
        words += [f"--{option.key}"] + ([] if option.is_flag else [given[option.key]])
        toml += f"{option.key} = {'true' if option.is_flag else repr(given[option.key])}\n"
    by_words = machine.load(*words)
    by_variables = machine.load(**{o.variable: given[o.key] for o in options.OPTIONS})
    machine.local_file.write_text(toml)
    by_file = machine.load()
    assert by_words == by_variables == by_file
    no_options = (
        "config_file", "engine_asked", "engine_reason", "place", "learn_of", "learn_program",
    )  # fmt: skip
    names = [name for name in by_words.values() if name not in no_options]
    assert len(names) == len(options.OPTIONS)
    assert all(by_words.value(name) != Config().value(name) for name in names)


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["--cluster"], 0),
        (["--cluster", "-q"], 0),
        (["--cluster=3"], 3),
        (["--cluster", "3"], 3),
        (["--cluster=off"], None),
        ([], None),
    ],
)
def test_a_cluster_may_say_how_many_nodes_it_has(
    machine: Machine, words: list[str], nodes: int | None
) -> None:
    assert machine.load(*words).cluster.nodes == nodes
    plain = options.parse_plain(words)
    assert plain is not None and sources.load(plain, {}, str(machine.cwd)).cluster.nodes == nodes


@pytest.mark.parametrize(
    ("words", "end", "name"),
    [
        (["--learn"], 1, ""),
        (["--learn", "-q"], 2, ""),
        (["--learn=train"], 1, "train"),
        (["--learn=off"], 1, None),
        (["--learn", "python"], 1, ""),
        ([], 0, None),
    ],
)
def test_a_profiles_name_is_given_by_an_equals_sign_for_the_next_word_is_the_command(
    machine: Machine, words: list[str], end: int, name: str | None
) -> None:
    assert options.options_end(words) == end
    assert machine.load(*words[:end]).learn.name == name
    plain = options.parse_plain(words[:end])
    assert plain is not None and sources.load(plain, {}, str(machine.cwd)).learn.name == name


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("--learn=", "a start profile's name is empty"),
        ("--learn-depth=0", "0 is not in 1..256"),
        ("--learn-depth=257", "257 is not in 1..256"),
        ("--learn-depth=many", "'many' is no number of requests"),
        ("--learn-budget=12", "12 is less than a page .4096 bytes.: say 1GiB"),
    ],
)
def test_what_is_wrong_with_an_option_of_learn_is_said(
    machine: Machine, word: str, what: str
) -> None:
    with pytest.raises(UffdPrefetchError, match=what):
        machine.load(word)


@pytest.mark.parametrize("text", ["0", "-3", "many", ""])
def test_what_is_no_number_of_nodes_is_said(machine: Machine, text: str) -> None:
    with pytest.raises(UffdPrefetchError, match="no number of nodes"):
        machine.load(f"--cluster={text}")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--cluster", "-q"],
        ["--cluster=4", "--meet", "/shared", "--share", "*.bin"],
        ["-q", "-f", "-v", "--strict", "--live", "--ownlock"],
        ["-o", "x.%r", "--policy", "fixed", "--size=1MiB", "--trace=", "--threshold", "nonsense"],
        ["--include", "a:b", "--include=*.mdb", "--exclude", "c", "--output", "a=b"],
    ],
)
def test_plain_options_are_read_as_argparse_reads_them(words: list[str]) -> None:
    assert options.parse_plain(words) == parse(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["-h"], ["--help"], ["--help-all"], ["-qf"], ["-oX"], ["--config", "F"], ["--headless"],
        ["--nonsense"], ["--size"], ["--size", "--strict"], ["--strict=1"], ["true"],
        ["--pol", "fixed"], ["-"], ["--size", "-5"], ["-o=x"], ["--"], [""],
    ],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_argparse(words: list[str]) -> None:
    assert options.parse_plain(words) is None


def test_fixed_has_its_own_distance(machine: Machine) -> None:
    loaded = machine.load("--policy", "fixed")
    assert loaded.fixed.distance_bytes == 8 << 20
    assert loaded.source.origins["distance_bytes"] == "default of policy fixed"
    assert machine.load("--policy", "fixed", "--distance", "4MiB").fixed.distance_bytes == 4 << 20
    assert machine.load("--distance", "auto").fixed.distance_bytes is None


def test_what_nodes_share_lies_in_the_pool(machine: Machine) -> None:
    loaded = machine.load("--cluster")
    assert (loaded.engine, loaded.source.origins["engine"]) == ("pool", "default of cluster")
    assert machine.load("--cluster", "--engine", "cache").engine == "cache"
    assert machine.load("--cluster=off").engine == "cache"


def test_globs_from_words_variables_and_files(machine: Machine) -> None:
    assert machine.load("--include", "a:b", "--include", "c").files.include == ("a:b", "c")
    assert machine.load(UFFDPREFETCH_EXCLUDE="a:b").files.exclude == ("a", "b")
    machine.local_file.write_text('include = ["*.mdb", "/data/*"]\nexclude = "x"')
    loaded = machine.load()
    assert (loaded.files.include, loaded.files.exclude) == (("*.mdb", "/data/*"), ("x",))


def test_wants() -> None:
    assert Config().files.wants("/any/thing")
    chosen = Config.of(include=("*.mdb", "/data/*"), exclude=("lock.mdb",))
    assert chosen.files.wants("/home/x.mdb") and chosen.files.wants("/data/deep/file")
    assert not chosen.files.wants("/home/x.txt") and not chosen.files.wants("/home/lock.mdb")


def test_whole_is_what_matches_and_by_default_nothing() -> None:
    assert not Config().files.wants_whole("/any/thing")
    chosen = Config.from_json(Config.of(whole=("*.gguf", "/data/*")).to_json())
    assert chosen.files.wants_whole("/home/x.gguf") and chosen.files.wants_whole("/data/deep/file")
    assert not chosen.files.wants_whole("/home/x.gguf.tmp")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"UFFDPREFETCH_POLCY": "auto"}, "'UFFDPREFETCH_POLCY', the nearest is"),
        ({"UFFDPREFETCH_SIZE": "big"}, "UFFDPREFETCH_SIZE: not a size: 'big'"),
        ({"UFFDPREFETCH_STRICT": "perhaps"}, "UFFDPREFETCH_STRICT: 'perhaps' is neither"),
        ({"UFFDPREFETCH_THRESHOLD": "1.5"}, "UFFDPREFETCH_THRESHOLD: 1.5 is not in 0..1"),
        ({"UFFDPREFETCH_THRESHOLD": "nan"}, "UFFDPREFETCH_THRESHOLD: nan is not in 0..1"),
        (
            {"UFFDPREFETCH_BUDGET": "1MiB", "UFFDPREFETCH_POLICY": "fixed"},
            "UFFDPREFETCH_BUDGET: 1MiB is less than --size 50MiB",
        ),
        (
            {"UFFDPREFETCH_DISTANCE": "5000"},
            "UFFDPREFETCH_DISTANCE: 5000 is not a multiple of",
        ),
        ({"UFFDPREFETCH_SIZE": "100"}, "UFFDPREFETCH_SIZE: 100 is less than a page"),
        ({"UFFDPREFETCH_MAX_RATE": "1kB/s"}, "below 1 MiB/s"),
        ({"UFFDPREFETCH_OUTPUT": ""}, "UFFDPREFETCH_OUTPUT: is empty"),
        ({"UFFDPREFETCH_ENGINE": "cash"}, "did you mean cache?"),
        ({"UFFDPREFETCH_EVICT": "belady"}, "'belady' is none of cyclic, lru"),
        ({"UFFDPREFETCH_HUGE_PAGES": "always"}, "'always' is none of auto, off"),
        ({"UFFDPREFETCH_READS": "on"}, "'on' is none of auto, off"),
        ({"UFFDPREFETCH_RESOLVE": "service"}, "unknown key 'UFFDPREFETCH_RESOLVE'"),
    ],
)
def test_what_is_wrong_is_one_clear_line(
    machine: Machine,
    variables: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UffdPrefetchError) as caught:
        machine.load("--strict", **variables)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2
    assert machine.load(**variables, UFFDPREFETCH_MIN_SIZE="1MiB").files.min_size_bytes == 1 << 20
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and said.endswith("; ignored\n")


def test_what_does_not_fit_is_named_as_it_was_written(machine: Machine) -> None:
    with pytest.raises(UffdPrefetchError, match=r"^--size 100 is less than a page"):
        machine.load("--size", "100")
    machine.local_file.write_text("size = 100\n")
    with pytest.raises(UffdPrefetchError) as caught:
        machine.load("--strict")
    assert caught.value.message.startswith(f"{machine.local_file}: size: 100 is less than a page")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("polic = 'auto'", "unknown key 'polic', the nearest is 'policy'"),
        ("size = [1]", "size: wants a string or a number"),
        ("size = true", "size: wants a string or a number"),
        ("strict = 'yes'", "strict: wants true or false"),
        ("include = [1]", "include: wants a list of globs"),
        ("not toml at all", "not TOML"),
    ],
)
def test_a_wrong_file_is_named(
    machine: Machine, toml: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.local_file.write_text(toml)
    for words in (["--strict"], ["--config", str(machine.local_file)]):
        with pytest.raises(UffdPrefetchError) as caught:
            machine.load(*words)
        assert message in caught.value.message
        assert str(machine.local_file) in caught.value.message
        assert caught.value.exit_code == 2
    assert machine.load("--size", "1MiB").fixed.size_bytes == 1 << 20
    said = capsys.readouterr().err
    assert message in said and str(machine.local_file) in said and said.count("\n") == 1


def test_of_a_file_with_one_wrong_key_the_others_count(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.local_file.write_text("polic = 'auto'\nbudget = '1GiB'\n")
    assert machine.load().budget_bytes == 1 << 30
    assert "polic" in capsys.readouterr().err
    machine.local_file.unlink()
    machine.local_file.mkdir()
    assert machine.load().budget_bytes == Config.budget_bytes
    assert "cannot read configuration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["cmd", "-o", "x"], 0),
        (["-q", "-o", "file", "cmd", "--policy", "none"], 3),
        (["--policy=none", "cmd"], 1),
        (["--cluster", "cmd"], 1),
        (["--cluster", "4", "cmd"], 2),
        (["--cluster", "off", "cmd"], 2),
        (["--config", "F", "--headless", "cmd"], 3),
        (["-oX", "cmd"], 1),
        (["-fo", "out", "cmd"], 2),
        (["-qfo", "out"], 2),
        (["-qoX", "cmd"], 1),
        (["-size", "cmd"], 1),
        (["--nonsense", "cmd"], 1),
        (["--size"], 1),
        (["-q", "--live"], 2),
        ([], 0),
    ],
)
def test_options_end_at_the_first_word_that_is_none(words: list[str], end: int) -> None:
    assert options.options_end(words) == end


def test_variables_of_ours_that_are_no_options_are_let_pass(machine: Machine) -> None:
    loaded = machine.load(UFFDPREFETCH_RUN="x", UFFDPREFETCH_SOCKET="/s", UFFDPREFETCH_TEST_ANY="1")
    assert loaded == Config()


def test_json_there_and_back() -> None:
    before = Config.of(include=("a", "b"), distance_bytes=4096, max_rate_bytes_per_second=1 << 30)
    assert Config.from_json(before.to_json()) == before
    for text in ("", "[]", '{"no_such": 1}', '{"size_bytes": "x"}', '{"engine": "warp"}'):
        with pytest.raises(UffdPrefetchError) as caught:
            Config.from_json(text)
        assert caught.value.exit_code == 2


def test_a_nested_wrap_reads_back_what_the_outer_one_chose(machine: Machine) -> None:
    outer = machine.load(
        *("--policy", "fixed", "--size", "7MiB", "--include", "*.mdb", "-q"),
        *("--max-rate", "1GB/s", "--threshold", "0.5"),
    )
    assert machine.load(**options.as_variables(outer)) == outer
    assert options.as_variables(Config()) == {}


def test_a_default_that_was_chosen_reaches_a_nested_wrap(machine: Machine) -> None:
    """Else the variable that the command line overruled would win there."""
    outer = machine.load("--policy", "auto", UFFDPREFETCH_POLICY="none")
    assert outer.policy == "auto" and options.as_variables(outer)["UFFDPREFETCH_POLICY"] == "auto"


def test_describe_names_value_and_origin(machine: Machine) -> None:
    rows = {key: (value, origin) for key, value, origin in options.describe(machine.load("-v"))}
    assert rows["size"] == ("50MiB", "default")
    assert rows["verbose"] == ("1", "command line")
    assert rows["distance"] == ("auto", "default")


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--size", "1MiB"], ["--size does nothing without --policy fixed"]),
        (["--size", "1MiB", "--policy", "fixed"], []),
        (["--evict", "lru"], ["--evict does nothing without --engine pool"]),
        (["--evict", "lru", "--cluster"], []),
        (["--meet", "/x", "--serve-cpu", "2", "--engine", "pool"],
         ["--meet does nothing without --cluster", "--serve-cpu does nothing without --cluster"]),
        (["--interval", "5"], ["--interval does nothing without --live"]),
        ([], []),
    ],
)  # fmt: skip
def test_an_option_that_does_nothing_is_told(
    machine: Machine, words: list[str], lines: list[str]
) -> None:
    assert options.without_effect(machine.load(*words)) == lines
    assert options.without_effect(machine.load(UFFDPREFETCH_EVICT="lru")) == [], (
        "it may be a site's"
    )


def test_values_are_looked_at_together_and_not_one_by_one(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """In whatever order they stand; and the command line may make them fit."""
    machine.local_file.write_text("policy = 'fixed'\nsize = '8GiB'\nbudget = '16GiB'\n")
    for words in ([], ["--strict"], ["--config", str(machine.local_file)]):
        loaded = machine.load(*words)
        assert (loaded.fixed.size_bytes, loaded.budget_bytes) == (8 << 30, 16 << 30)
    machine.local_file.unlink()
    given = {"UFFDPREFETCH_POLICY": "fixed", "UFFDPREFETCH_SIZE": "8GiB"}
    assert machine.load("--budget", "16GiB", "--strict", **given).fixed.size_bytes == 8 << 30
    assert capsys.readouterr().err == ""
    loaded = machine.load(**given, UFFDPREFETCH_MIN_SIZE="1MiB")
    assert (loaded.policy, loaded.fixed.size_bytes) == ("fixed", Config().fixed.size_bytes)
    assert loaded.files.min_size_bytes == 1 << 20 and "; ignored" in capsys.readouterr().err
    with pytest.raises(UffdPrefetchError, match=r"^--budget 1MiB is less than --size"):
        machine.load("--budget", "1MiB", "--policy", "fixed")


@pytest.mark.parametrize("engine", ["cache", "pool"])
def test_one_policy_guesses_for_both_engines(machine: Machine, engine: str) -> None:
    assert machine.load("--engine", engine).policy == "auto"
    assert machine.load("--engine", engine, "--policy", "auto").policy == "auto"
    with pytest.raises(
        UffdPrefetchError,
        match=r"^--policy: 'survival' is none of auto, fixed, stride, plan, none$",
    ):
        machine.load("--engine", engine, "--policy", "survival")


def test_a_value_is_found_and_changed_by_its_name_in_json() -> None:
    chosen = Config.of({"meet": "command line"}, engine="pool", meet="/shared", size_bytes=1 << 20)
    assert (chosen.cluster.meet, chosen.fixed.size_bytes) == ("/shared", 1 << 20)
    assert chosen.value("meet") == "/shared" and chosen.values()["engine"] == "pool"
    other = chosen.but(meet=None, quiet=True)
    assert (other.cluster.meet, other.wrap.quiet, other.engine) == (None, True, "pool")
    assert other.source.origins == {"meet": "command line"}
    assert other.fingerprint() != chosen.fingerprint() == chosen.but(quiet=True).fingerprint()
    with pytest.raises(TypeError, match="no field 'siz'"):
        Config.of(siz=1)
