# SPDX-License-Identifier: Apache-2.0
"""Types of numpy arrays, by what is in them; one-dimensional unless a docstring says more."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

#: Of any kind: what comes from a file, or is handed on as it is.
Array = npt.NDArray[Any]
#: Offsets, lengths, record numbers.
Int64Array = npt.NDArray[np.int64]
#: Rates, times in seconds, probabilities.
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]
