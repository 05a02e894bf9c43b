# SPDX-License-Identifier: Apache-2.0
"""orders/path_hypotheses.py: what opens prove, in drawn jobs; what is made of lists and opens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from conftest import warnings_fail

from uffdprefetch.job.channel import packed
from uffdprefetch.orders.key_lists import KeyList
from uffdprefetch.orders.path_hypotheses import (
    ASKED_MAX,
    FileEvidence,
    SampleOpens,
    evidence,
    hypotheses,
)

pytestmark = warnings_fail


class DrawnJob:
    """A shuffled epoch, with or without workers, beside others that open files by chance."""

    def __init__(self, seed: int) -> None:
        source = self._source = random.Random(seed)
        self.count = source.choice([60, 150, 400, 2000])
        self.batch = source.choice([4, 16, 32, 64])
        workers = source.choice([0, 0, 1, 2, 4])
        self.ahead = self.batch * (2 * workers + 1)
        self._reads_ahead = self.ahead - self.batch
        self._noise = source.choice([0, 0, 0.5, 2])
        self.order = source.sample(range(self.count), self.count)
        if source.random() < 0.2:
            self.order = [source.randrange(self.count) for _ in range(self.count)]

    def verdict(self, files: Sequence[int]) -> FileEvidence:
        """What is known in the end, or once it is decided, of a job that opens ``files[sample]``
        where a list says that it is the file of that number."""
        opened: set[str] = set()
        upto = 0
        for read in range(0, min(self.count, 40 * self.batch) + 1, self.batch):
            for place in self.order[upto : read + self._reads_ahead]:
                opened.add(str(files[place]))
                if self._source.random() < self._noise:
                    opened.add(str(self._source.randrange(self.count)))
            upto = max(upto, read + self._reads_ahead)
            later = read + self.ahead
            used = set(self.order[:later])
            sure = self.order[min(self.ahead, read) : read]
            other = [sample for sample in self.order[later:] if sample not in used]
            found = evidence(*(list(map(str, each)) for each in (self.order[:read], sure, other)),
                             frozenset(opened))  # fmt: skip
            if found.proves or found.refutes:
                break
        return found


def test_a_list_in_the_right_order_is_proven_and_none_in_another_one() -> None:
    proven = 0
    for seed in range(300):
        job = DrawnJob(seed)
        right = job.verdict(range(job.count))
        assert not right.refutes, seed
        proven += right.proves
        wrong = DrawnJob(seed).verdict(random.Random(seed).sample(range(job.count), job.count))
        assert not wrong.proves, seed
    assert proven > 200, "of the others few files are left that are not read ahead"


def named(name: str, values: list[str]) -> KeyList:
    return KeyList.parse(name, "text", packed(value.encode() for value in values))


def numbers(name: str, values: Sequence[int]) -> KeyList:
    return KeyList.parse(name, "ints", np.array(values, np.int64).tobytes())


NAMES = [f"c{i % 3}/{i:03}.jpg" for i in range(40)]


def test_a_list_is_below_a_directory_that_has_its_files() -> None:
    there = {f"/b/{name}" for name in NAMES}
    lists = [named("n", NAMES), named("labels", ["cat", "dog"] * 20), numbers("k", range(40))]
    (found,) = hypotheses(lists, 40, [b"/a/", b"/b/"], [], there.__contains__)
    assert found.paths(np.array([3, 0])) == [f"/b/{NAMES[3]}", f"/b/{NAMES[0]}"]
    assert found.name == "files '/b/' + .n"
    assert hypotheses(lists, 40, [b"/a/"], [b".png"], there.__contains__) == []


def test_a_list_of_numbers_chooses_or_several_samples_share_a_file() -> None:
    there = set(NAMES).__contains__
    choice = [7 * i % 40 for i in range(40)]
    lists = [named("n", NAMES), numbers("perm", choice), numbers("label", [1] * 40)]
    plain, chosen = hypotheses(lists, 40, [b""], [], there)
    assert chosen.paths(np.arange(3)) == [NAMES[i] for i in choice[:3]]
    assert plain.paths(np.arange(3)) == NAMES[:3] and chosen.name == "files .n[perm[i]]"
    (shared,) = hypotheses([named("n", NAMES)], 160, [b""], [], there)
    assert shared.paths(np.array([3, 4, 159])) == [NAMES[0], NAMES[1], NAMES[39]]
    assert hypotheses([named("n", NAMES)], 50, [b""], [], there) == []


@pytest.mark.parametrize("form", ["/x/{}.bin", "/x/img_{}-v2.bin", "/{}/data.bin"])
def test_what_stands_around_names_is_learned_from_opens(form: str) -> None:
    ids = [f"{i * 7919 % 1000:03}" for i in range(40)]
    there = {form.format(name) for name in ids}
    samples = np.random.default_rng(1).permutation(40)[:12]
    opened = ["/lib/x.so", *(form.format(ids[i]) for i in samples)]
    seen = SampleOpens(samples, [path.encode() for path in opened])
    found = hypotheses([named("ids", ids)], 40, [b""], [], there.__contains__, seen)
    if form.startswith("/x/"):
        assert found[0].paths(np.arange(2)) == [form.format(name) for name in ids[:2]]
    else:
        assert found == [], "a directory for each sample is not looked into"


@pytest.mark.parametrize(("form", "base"), [("/x/{:05}.bin", 0), ("/x/a_{}_b.bin", 1)])
def test_names_that_are_the_samples_number_are_learned(form: str, base: int) -> None:
    there = {form.format(i + base) for i in range(40)}
    samples = np.random.default_rng(1).permutation(40)[:12]
    opened = [form.format(i + base).encode() for i in samples.tolist()]
    (found,) = hypotheses([], 40, [b""], [], there.__contains__, SampleOpens(samples, opened))
    assert found.paths(np.array([0, 39])) == [form.format(base), form.format(39 + base)]


def test_a_hostile_jobs_lists_bound_the_work() -> None:
    asked: list[str] = []
    lists = [named(f"n{i}", [f"{j}/{i}" for j in range(20)]) for i in range(40)]
    lists += [numbers(f"k{i}", np.random.default_rng(i).permutation(20)) for i in range(40)]
    directories = [b"/%d/" % i for i in range(100)]
    assert hypotheses(lists, 20, directories, [b".a"] * 9, lambda p: bool(asked.append(p))) == []
    assert len(asked) <= ASKED_MAX
    for wrong in (["a\0b"] * 20, [""] * 20, ["x" * 5000] * 20, []):
        assert hypotheses([named("n", wrong)], 20, [b""], [], lambda path: True) == []
    assert hypotheses([named("n", NAMES)], 0, [b""], [], lambda path: True) == []
