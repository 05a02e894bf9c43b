# SPDX-License-Identifier: Apache-2.0
"""Chooses among hypotheses on samples and records by what the job has touched. Pure.

Samples are known to have been read; each hypothesis says which records those were, whose pages must
then be in the readers' page tables. orders/residency_evidence.py says what that proves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.orders.hypothesis import Hypothesis
from uffdprefetch.orders.residency_evidence import (
    CERTAIN,
    MAPPED_SHARE,
    TRUE_SHARE,
    Prediction,
    Present,
    ResidencyEvidence,
)

#: Latest samples that are judged by, widened while they are undecided: what was read long ago may
#: no longer be mapped.
WINDOWS = (64, 256, 1024)
#: Samples not read that they are compared with.
OTHERS = 256
#: Samples read, and perhaps read ahead, that are excluded from the comparison.
KNOWN_MAX = 1 << 14
#: Samples read after which the search ends where no hypothesis fits, and one that is not proven is
#: not waited for.
ENOUGH_SAMPLES = 64
#: Hypotheses compared pairwise at most (quadratic).
RIVALS_MAX = 16


@dataclass(frozen=True)
class HypothesisChoice:
    """hypotheses: those that hold together: a sample reads the records of all of them. why: a line
    for people. decided: more evidence would not change it; when False there are none."""

    hypotheses: tuple[Hypothesis, ...]
    why: str
    decided: bool


def choose(
    index: RecordIndex,
    found: Sequence[Hypothesis],
    seen: Array,
    present: Present,
    file: str = "it",
    ahead: Array | None = None,
) -> HypothesisChoice:
    """The hypotheses that the touches prove.

    ``seen``: samples that have been read by now, in reading order. ``present``: (starts, ends) of
    ranges of the file -> the share of each one's pages that is in the readers' page tables, 0 to 1:
    asked for some thousand ranges, and for the whole file when no hypothesis holds. ``file``: its
    name, for people. ``ahead``: samples that may have been read too: those that come next in the
    order, as far as workers can be; without them two ways that lead to the same records in another
    order may be taken for two records of a sample.
    """
    if not found:
        why = f"no key of {file} can be made of sample numbers or of the data set's attributes"
        if index.keys is None:
            why = f"{file} has fewer records than the data set has samples: {len(index)}"
        return HypothesisChoice((), why + "; give key= ...", True)
    samples = np.asarray(seen).astype(np.int64)
    maybe = np.asarray([] if ahead is None else ahead).astype(np.int64)
    maybe = np.unique(np.concatenate([samples[-KNOWN_MAX:], maybe[:KNOWN_MAX]]))
    evidence = ResidencyEvidence(index, present)
    predictions = [_predict(each, maybe) for each in found]
    undecided = None
    for window in WINDOWS:
        read = _last_distinct(samples, window)
        choice = _chosen(
            [_with_read(each, read) for each in predictions], evidence, len(read), file
        )
        if choice.hypotheses:
            return choice
        undecided = undecided if choice.decided else choice
        if window >= len(samples):
            break
    return undecided or choice


def _predict(hypothesis: Hypothesis, known: Array) -> Prediction:
    """Its records of samples that may have been read, and of some that were not."""
    source = np.random.default_rng(len(known))
    others = source.integers(0, hypothesis.samples, 2 * max(WINDOWS))
    others = np.unique(others[~np.isin(others, known)])
    others = source.permutation(others)[:OTHERS]
    of_known = np.unique(hypothesis.records(known)[0])
    other = np.setdiff1d(hypothesis.records(others)[0], of_known)
    return Prediction(hypothesis, of_known[:0], of_known, other)


def _with_read(prediction: Prediction, read: Array) -> Prediction | None:
    """With its records of ``read``; None when it has none for too many of them."""
    records, which = prediction.hypothesis.records(read)
    if len(np.unique(which)) < TRUE_SHARE * len(read):
        return None
    return replace(prediction, read=np.unique(records))


def _last_distinct(samples: Array, most: int) -> Array:
    """The last ``most`` distinct ones."""
    found, first = np.unique(samples[::-1], return_index=True)
    return found[np.argsort(first)][:most]


def _chosen(
    usable: Sequence[Prediction | None], evidence: ResidencyEvidence, samples: int, file: str
) -> HypothesisChoice:
    predictions = [each for each in usable if each is not None]
    everything = [part for each in predictions for part in (each.read, each.other)]
    evidence.measure(np.unique(np.concatenate([np.zeros(0, np.int64), *everything])))
    holding = [each for each in predictions if each.seen(evidence).holds]
    proven = [each for each in holding if each.proof(evidence) >= CERTAIN]
    if proven:
        return _among(proven, holding, evidence, samples)
    if holding:
        return HypothesisChoice((), _unproven(holding, evidence, file), False)
    return _none(predictions, evidence, samples, file)


# ---- several, or none ---------------------------------------------------------------------------


def _among(
    proven: list[Prediction],
    holding: list[Prediction],
    evidence: ResidencyEvidence,
    samples: int,
) -> HypothesisChoice:
    """Those proven whichever of the others is true: one may hold only because its records are
    nearly those of the true one.

    One that is not proven may be a second record of each sample. It is waited for until so many
    ``samples`` have been read that it would be proven, too: small records between those of the
    samples are mapped with them, and are neither proven nor refuted.
    """
    if len(holding) > RIVALS_MAX:
        return HypothesisChoice((), f"{len(holding)} ways look true: too many to tell apart", False)
    numbers = range(len(holding))
    sure = {i for i in numbers if holding[i] in proven}
    better, refutes = _compared(holding, evidence)
    beaten = {j for i, j in refutes if i in sure and (j, i) not in better}
    remaining = [i for i in numbers if i not in beaten]
    needed = sure if samples >= ENOUGH_SAMPLES else set(numbers)
    for i in needed.intersection(remaining):
        for j in remaining:
            if i != j and (i, j) not in better:
                names = f"{holding[i].hypothesis.name}, or {holding[j].hypothesis.name}"
                return HypothesisChoice((), f"{names}: the samples read so far do not tell", False)
    taken = [holding[i] for i in remaining if i in sure]
    if not taken:
        return HypothesisChoice((), "several ways look true and none of them the best", False)
    names = " and ".join(each.hypothesis.name for each in taken)
    shares = " and ".join(f"{each.seen(evidence)}" for each in taken)
    why = f"{names}: {shares} records of samples that were read are mapped"
    return HypothesisChoice(tuple(each.hypothesis for each in taken), why, True)


def _compared(
    holding: list[Prediction], evidence: ResidencyEvidence
) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Two relations of their numbers: (i, j) of which i is proven even if j is true, and of which
    it is j if one of the two is wrong."""
    better: set[tuple[int, int]] = set()
    refutes: set[tuple[int, int]] = set()
    numbers = range(len(holding))
    for i, j in permutations(numbers, 2):
        others = [holding[k].known for k in numbers if k != i]
        far, near = holding[i].is_proven_beside(
            holding[j], np.unique(np.concatenate(others)), evidence
        )
        beats = holding[i].beats(holding[j], evidence)
        if far or near or beats:
            better.add((i, j))
        if far or beats:
            refutes.add((i, j))
    return better, refutes


def _unproven(holding: list[Prediction], evidence: ResidencyEvidence, file: str) -> str:
    best = max(holding, key=lambda each: each.proof(evidence))
    others = evidence.share(best.other)
    if not others.count:
        why = "nearly all samples have been read already"
    elif others.share >= MAPPED_SHARE:
        why = f"so are {others} others: nearly all of {file} is mapped"
    else:
        why = f"so are {others} others: too few samples have been read"
    return f"{best.hypothesis.name}: {best.seen(evidence)} records are mapped, but {why}"


def _none(
    predictions: list[Prediction], evidence: ResidencyEvidence, samples: int, file: str
) -> HypothesisChoice:
    """None holds: too few samples, little is mapped, or no hypothesis is right."""
    if samples < ENOUGH_SAMPLES:
        return HypothesisChoice((), f"only {samples} samples have been read", False)
    needed_bytes = min((_bytes(evidence, each.read) for each in predictions), default=0)
    if evidence.mapped_bytes < needed_bytes / 2:
        # workers that have ended take their page tables with them
        return HypothesisChoice((), f"the readers have little of {file} mapped now", False)
    if not predictions:
        why = f"too many of {samples} samples that were read have no record of {file}"
        return HypothesisChoice((), why + "; give key= ...", True)
    best = max(predictions, key=lambda each: each.seen(evidence).share)
    why = (f"of the records of {file} that {samples} read samples should have touched too few were:"
           f" {best.seen(evidence)} by {best.hypothesis.name}")  # fmt: skip
    if any(each.seen(evidence).below < CERTAIN / 2 for each in predictions):
        return HypothesisChoice((), why, False)
    return HypothesisChoice((), why + "; give key= ...", True)


def _bytes(evidence: ResidencyEvidence, records: Array) -> int:
    starts, ends = evidence.extents(records)
    return int((ends - starts).sum())
