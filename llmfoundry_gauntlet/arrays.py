"""Types of arrays. What reads YAML files imports numpy within functions alone, so that commands start quickly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]  # token ids
Ints = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]  # of any width
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
ClusterNumbers = npt.NDArray[np.uint64]
