# SPDX-License-Identifier: Apache-2.0
"""The batches of each epoch, split among the nodes. Pure.

[HDMLP] chapters 3.1.3 and 4.1.3. An order is an int32 array of shape (batches, N, b): the samples
of a node's part of a batch in the order in which it consumes them, padded with -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from uffdprefetch.sim.model import Training

#: Padding of an order.
NONE = -1


def _uniform(batch: int, nodes: int) -> list[np.ndarray]:
    """Equal parts; the last node takes the rest."""
    part = -(-batch // nodes)
    return [np.arange(min(i * part, batch), min((i + 1) * part, batch)) for i in range(nodes)]


def _whole(batch: int, nodes: int) -> list[np.ndarray]:
    """Every node reads all of the batch (model parallelism)."""
    return [np.arange(batch)] * nodes


def _imbalanced(batch: int, nodes: int) -> list[np.ndarray]:
    """Half of the nodes 2 ceil(B/N) samples, the others ceil(B/N) / 2.

    As in [HDMLP]. Their sum exceeds a batch, so indices wrap around: a few samples are read by two
    nodes.
    """
    if nodes == 1:
        return [np.arange(batch)]
    part = -(-batch // nodes)
    sizes = [min(batch, 2 * part) if i < nodes // 2 else max(1, part // 2) for i in range(nodes)]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    return [np.arange(begins[i], begins[i + 1]) % batch for i in range(nodes)]


SCHEMES: dict[str, Callable[[int, int], list[np.ndarray]]] = {
    "uniform": _uniform,
    "whole": _whole,
    "imbalanced": _imbalanced,
}


def places(batch: int, nodes: int, scheme: str, width: int | None = None) -> np.ndarray:
    """(N, b): indices into a batch of each node's part, padded with -1."""
    parts = SCHEMES[scheme](batch, nodes)
    out: np.ndarray = np.full((nodes, width or max(1, max(map(len, parts)))), NONE, np.int64)
    for node, part in enumerate(parts):
        out[node, : len(part)] = part
    return out


@dataclass(frozen=True)
class Workload:
    """A data set and its training."""

    sizes: np.ndarray  # (F,) float64, MB: s_k
    training: Training

    @property
    def F(self) -> int:
        return len(self.sizes)

    @property
    def S(self) -> float:
        """MB: the whole data set."""
        return float(self.sizes.sum())

    @property
    def T(self) -> int:
        """Iterations of an epoch."""
        whole, rest = divmod(self.F, self.training.B)
        return whole + (1 if rest and not self.training.drop_last else 0)

    def with_zero(self) -> np.ndarray:
        """(F + 1,): the sizes, and a 0 for the index -1."""
        return np.append(self.sizes, 0.0)

    def epoch(self, number: int, nodes: int) -> np.ndarray:
        """The order of epoch ``number`` (from 0): int32, shape (T, N, b)."""
        training = self.training
        if training.order == "sequential":
            samples: np.ndarray = np.arange(self.F, dtype=np.int32)
        else:
            random = np.random.default_rng([training.seed, number])
            samples = random.permutation(self.F).astype(np.int32)
        whole = self.F // training.B
        layout = places(training.B, nodes, training.scheme)
        batches = samples[: whole * training.B].reshape(whole, training.B)
        out = np.where(layout >= 0, batches[:, layout], NONE)
        rest = samples[whole * training.B :]
        if len(rest) and not training.drop_last:
            last = places(len(rest), nodes, training.scheme, layout.shape[1])
            out = np.concatenate([out, np.where(last >= 0, rest[last], NONE)[None]])
        return out.astype(np.int32, copy=False)

    def epochs(self, nodes: int) -> Iterator[np.ndarray]:
        """The orders of all epochs, one at a time."""
        for number in range(self.training.E):
            yield self.epoch(number, nodes)
