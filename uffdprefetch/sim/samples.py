# SPDX-License-Identifier: Apache-2.0
"""The samples of a data set and their sizes: drawn from a distribution, or those of real files.

[HDMLP] chapter 4.1.2. A distribution is any continuous or discrete one of scipy.stats.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from uffdprefetch.base.errors import EXIT_CANNOT, UffdPrefetchError, pip_install, usage_error

if TYPE_CHECKING:
    from uffdprefetch.sim.table import TomlTable

MB = 1e6
#: Samples at most: their sizes alone are 8 GB; more is a typing error.
F_MAX = 1_000_000_000


@dataclass(frozen=True)
class DataSet:
    """Where sample sizes come from: a path, one size for all, or a distribution."""

    path: str | None = None
    F: int = 0
    size: float = 0.0  # MB, of every sample
    distribution: str | None = None
    loc: float = 0.0  # MB
    scale: float = 1.0  # MB
    least: float = 0.0  # MB: drawn sizes are clipped to [least, most]
    most: float | None = None
    shape: Mapping[str, float] = field(default_factory=dict)

    def sizes(self, seed: int) -> np.ndarray:
        """(F,) MB; the same for the same seed. Raises UffdPrefetchError when files cannot be read,
        scipy is missing, or the distribution does not take these parameters."""
        if self.path is not None:
            return _sizes_of(self.path) / MB
        if self.distribution is None:
            return np.full(self.F, self.size)
        drawn = self._drawn(np.random.default_rng([seed, 0x5A]))
        if not np.isfinite(drawn).all():
            raise usage_error(f"distribution {self.distribution}: not all sizes are finite")
        return np.clip(drawn, self.least, self.most)

    def _drawn(self, random: np.random.Generator) -> np.ndarray:
        try:
            from scipy import stats
        except ImportError:
            raise UffdPrefetchError(
                f"sizes from a distribution need scipy: {pip_install('scipy')}",
                EXIT_CANNOT,
            ) from None
        made: Any = getattr(stats, str(self.distribution), None)
        if not hasattr(made, "rvs"):
            raise usage_error(
                f"distribution {self.distribution!r}: scipy.stats has none of this "
                "name (norm, lognorm, gamma, ...)"
            )
        # A discrete distribution counts in MB, and has no scale.
        discrete = isinstance(made, stats.rv_discrete)
        scale = {} if discrete else {"scale": self.scale}
        try:
            drawn = made.rvs(**self.shape, loc=self.loc, **scale, size=self.F, random_state=random)
        except (TypeError, ValueError) as error:
            raise usage_error(f"distribution {self.distribution}: {error}") from None
        return np.asarray(drawn, float)

    @classmethod
    def parse(cls, table: TomlTable) -> DataSet:
        """The [dataset] table of a scenario."""
        from uffdprefetch.sim import quantities as q

        if "path" in table.values:
            made = cls(path=table.take("path", q.text))
        elif "size" in table.values:
            made = cls(F=table.take("F", q.whole(1, F_MAX)), size=table.take("size", q.size_mb))
        else:
            distribution = table.take("distribution", q.text)
            F = table.take("F", q.whole(1, F_MAX))
            made = cls(
                None,
                F,
                0.0,
                distribution,
                table.take("loc", q.size_mb, 0.0),
                table.take("scale", q.size_mb, 1.0),
                table.take("min", q.size_mb, 0.0),
                table.take("max", q.size_mb, None),
                table.take("shape", q.numbers, {}),
            )
        table.done()
        return made


def _sizes_of(path: str) -> np.ndarray:
    """Bytes of every sample: the records of a record file, or the files below a directory."""
    from uffdprefetch.formats.detect import open_index

    if os.path.isdir(path) and not os.path.lexists(os.path.join(path, "data.mdb")):
        # Sorted: the directory's own order changes with a copy.
        files = sorted(
            os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names
        )
        try:
            sizes = [os.stat(name).st_size for name in files]
        except OSError as error:
            raise usage_error(f"cannot read {error.filename}: {error.strerror}") from None
        if not sizes:
            raise usage_error(f"{path}: no file below it: the path of a data set is needed")
        return np.array(sizes, float)
    index = open_index(path)
    if not len(index):
        raise usage_error(f"{path}: holds no record")
    records = np.arange(len(index))
    starts, ends = index.extents(records)
    owner: np.ndarray = np.repeat(records, index.extent_counts(records))
    return np.bincount(owner, ends - starts, len(records))
