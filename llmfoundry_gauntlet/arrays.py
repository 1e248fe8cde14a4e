"""Names of the arrays' types. Whatever the command line needs to read YAML files imports numpy only where it counts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]  # token ids
Ints = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]  # of any width
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
ClusterNumbers = npt.NDArray[np.uint64]
