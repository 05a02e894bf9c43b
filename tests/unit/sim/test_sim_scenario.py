# SPDX-License-Identifier: Apache-2.0
"""sim/scenario.py: what a scenario file says, and the one line for each way to get it wrong."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest
from conftest import warnings_fail
from sim_bed import SMALL

from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError
from uffdprefetch.sim import simulate
from uffdprefetch.sim.model import Readings
from uffdprefetch.sim.scenario import Scenario, load, shipped

pytestmark = warnings_fail


def loaded(tmp_path: Path, text: str) -> Scenario:
    path = tmp_path / "s.toml"
    path.write_text(text)
    return load(str(path))


def test_a_scenario_says_what_it_means(tmp_path: Path) -> None:
    scenario = loaded(tmp_path, SMALL)
    system = scenario.system
    assert (system.N, system.c, system.beta, system.b_c, system.b_fs) == (2, 100, 200, 1000, 2000)
    assert float(system.t(2)) == pytest.approx(66 + 80 / 3)
    staging, ram = system.classes
    assert (staging.d, staging.p, ram.p) == (10, 2, 4) and ram.d == pytest.approx(1073.741824)
    assert float(ram.r(2)) == 10_000 and float(ram.w(3)) == 8000
    assert float(staging.w(1)) == float(staging.r(1)) == 10_000  # writing: as reading, if not said
    assert scenario.dataset.sizes(0).tolist() == [0.11] * 100
    assert scenario.training.drop_last and scenario.training.scheme == "uniform"
    assert [p.name for p in scenario.policies] == ["naive", "ours"]
    rows = list(simulate.run(scenario, simulate.workload_of(scenario)))
    assert all(row.outcome is not None and row.outcome.seconds > 0 for row in rows)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('c = "100MB/s"', "c = 100", "system.c: 100 has no unit"),
        ('c = "100MB/s"', 'c = "100"', "system.c: '100' has no unit"),
        ('c = "100MB/s"', 'c = "100MB"', "system.c: '100MB' is no rate"),
        ('c = "100MB/s"', 'c = "-100MB/s"', "system.c: '-100MB/s' is negative"),
        ('c = "100MB/s"', 'c = "0MB/s"', "system.c: '0MB/s': a rate is more than nothing"),
        ('c = "100MB/s"', 'c = "fast"', "system.c: not a rate: 'fast'"),
        ('c = "100MB/s"', "", "system.c: missing"),
        ('d = "10MB"', 'd = "-1MB"', "system.classes[0].d: '-1MB' is negative"),
        ('d = "10MB"', 'd = "10"', "system.classes[0].d: '10' has no unit"),
        ("p = 2", "p = 0", "system.classes[0].p: 0: a whole number from 1 on"),
        ("N = 2", "N = -2", "system.N: -2: a whole number from 1 on"),
        ("N = 2", 'N = "two"', "system.N: 'two': a whole number"),
        ("N = 2", "N = true", "system.N: True: a whole number"),
        ('t = { 1 = "66MB/s", 4 = "146MB/s" }', "t = {}", "system.t: a curve without a point"),
        ('t = { 1 = "66MB/s", 4 = "146MB/s" }', "t = 66", "system.t: 66: a curve is a rate or"),
        ('t = { 1 = "66MB/s"', 't = { 0 = "66MB/s"', "system.t: a curve's points are whole"),
        ('t = { 1 = "66MB/s"', "t = { 1 = 66", "system.t: at 1: 66 has no unit"),
        (
            'policy = "naive"',
            'policy = "naiv"',
            "policies[0].policy: 'naiv' is unknown; did you mean 'naive'?",
        ),
        ('policy = "naive"', "", "policies[0].policy: missing"),
        ('evict = "lru"', 'evict = "random"', "policies[1]: evict: 'random' is none of"),
        ('evict = "lru"', 'evikt = "lru"', "policies[1].evikt: unknown key; did you mean evict?"),
        ('name = "ours"', 'name = "naive"', "policies: two are called 'naive'"),
        ("E = 2", "E = 0", "training.E: 0: a whole number from 1 on"),
        (
            "E = 2",
            "E = 2\nscheme = 'unform'",
            "training.scheme: 'unform' is unknown; did you mean 'uniform'?",
        ),
        ("E = 2", "E = 2\ndrop_last = 1", "training.drop_last: 1: true or false is needed"),
        ("[training]", "[trainin]", "training: missing"),
        ("F = 100", "F = 0", "dataset.F: 0: a whole number from 1 on"),
        ('size = "110kB"', "", "dataset.distribution: missing"),
        ('size = "110kB"', 'distribution = "normal"', "'normal': scipy.stats has none"),
        ('size = "110kB"', 'distribution = "lognorm"', "distribution lognorm: "),
        ('size = "110kB"', 'distribution = "norm"\nshape = {s = "x"}', "dataset.shape: s: 'x'"),
        ('size = "110kB"', 'distribution = "cauchy"\nshape = {s = 1}', "distribution cauchy: "),
        ("B = 10", "B = 101", "training.B: 101 is more than the data set's 100 samples"),
        ('name = "RAM"', 'name = "staging"', "system.classes: two are called 'staging'"),
        ('evict = "lru"', 'evict = "lru"\nclasses = []', "policies[1].classes: the first one"),
        ('evict = "lru"', 'evict = "lru"\npublished = nan', "published: nan: seconds"),
        (
            "[training]",
            "[measured.file_system.4096]\n1 = '0 (n=1)'\n[training]",
            "measured.file_system: not as calibrate writes it",
        ),
        ("title", "titel", "titel: unknown key; did you mean title?"),
        ("N = 2", "N = ", "not TOML"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in SMALL
    with pytest.raises(UffdPrefetchError) as raised:
        scenario = loaded(tmp_path, SMALL.replace(old, new, 1))
        simulate.workload_of(scenario)
    message = raised.value.message
    assert said in message and "\n" not in message
    assert raised.value.exit_code == EXIT_USAGE
    # What scipy says comes when sizes are drawn, not when the file is read.
    assert "s.toml" in message or message.startswith(("distribution ", "training.B"))


@pytest.mark.parametrize("part", ["[[policies]]", "[[system.classes]]"])
def test_nothing_where_something_is_needed(tmp_path: Path, part: str) -> None:
    text = SMALL
    while part in text:
        begin = text.index(part)
        end = text.find("\n[", begin + 1)
        text = text[:begin] + (text[end + 1 :] if end > 0 else "")
    if part == "[[policies]]":
        said = "policies: at least one"
    else:
        said = "system.classes: missing"
    with pytest.raises(UffdPrefetchError, match=r"needed|missing") as raised:
        loaded(tmp_path, text)
    assert said in raised.value.message


def test_sizes_of_any_distribution(tmp_path: Path) -> None:
    text = SMALL.replace(
        'size = "110kB"',
        'distribution = "lognorm"\nscale = "100kB"\n'
        'shape = { s = 0.5 }\nmin = "50kB"\nmax = "300kB"',
    )
    sizes = loaded(tmp_path, text.replace("F = 100", "F = 20000")).dataset.sizes(3)
    assert sizes.min() == 0.05 and sizes.max() == 0.3
    assert np.median(sizes) == pytest.approx(0.1, rel=0.03)
    again = loaded(tmp_path, text.replace("F = 100", "F = 20000")).dataset
    assert np.array_equal(again.sizes(3), sizes) and not np.array_equal(again.sizes(4), sizes)
    counted = SMALL.replace('size = "110kB"', 'distribution = "poisson"\nshape = { mu = 3 }')
    assert set(loaded(tmp_path, counted).dataset.sizes(0)) <= set(map(float, range(20)))


def test_sizes_of_real_data(tmp_path: Path) -> None:
    folder = tmp_path / "files" / "below"
    folder.mkdir(parents=True)
    for number in range(5):
        (folder / str(number)).write_bytes(bytes(1000 * (number + 1)))
    by_path = SMALL.replace('F = 100\nsize = "110kB"', f'path = "{tmp_path / "files"}"')
    assert sorted(loaded(tmp_path, by_path).dataset.sizes(0)) == [0.001 * n for n in range(1, 6)]
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for number in range(30):
            txn.put(b"%03d" % number, bytes(100 + number))
    by_path = SMALL.replace('F = 100\nsize = "110kB"', f'path = "{tmp_path / "db"}"')
    sizes = loaded(tmp_path, by_path).dataset.sizes(0) * 1e6
    assert sizes.round().tolist() == [100 + number for number in range(30)]


def test_a_data_set_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "link").symlink_to("nowhere")
    for name in ("empty", "none", "dangling"):
        text = SMALL.replace('F = 100\nsize = "110kB"', f'path = "{tmp_path / name}"')
        with pytest.raises(UffdPrefetchError) as raised:
            simulate.workload_of(loaded(tmp_path, text))
        assert name in raised.value.message and "\n" not in raised.value.message


def test_those_that_come_along_can_be_loaded_by_name() -> None:
    names = shipped()
    assert {
        "paper5-1",
        "paper5-2",
        "paper5-3",
        "paper5-4",
        "paper5-table5.5",
        "paper5-table5.6",
        "paper5-figure3.1",
    } <= set(names)
    for name, title in names.items():
        assert load(name).title == title
    with pytest.raises(UffdPrefetchError, match=r"no scenario 'paper6'.*paper5-1"):
        load("paper6")


def test_a_policys_own_readings_and_classes(tmp_path: Path) -> None:
    text = SMALL.replace(
        'evict = "lru"',
        'evict = "lru"\nwrite = "once"\npublished = 3\nclasses = '
        '[{ name = "staging", d = "5MB", p = 1, r = "1GB/s" }]',
    )
    ours = loaded(tmp_path, text).policies[1]
    assert ours.readings == Readings("once") and ours.published == 3
    assert ours.classes is not None and len(ours.classes) == 1 and ours.classes[0].d == 5
