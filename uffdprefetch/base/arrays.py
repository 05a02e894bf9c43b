# SPDX-License-Identifier: Apache-2.0
"""Types of numpy arrays by their elements; one-dimensional unless a docstring says otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

#: Of any element type.
Array = npt.NDArray[Any]
#: Offsets, lengths, record numbers.
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]
