"""NumPy archives on disk: one that is damaged, or lacks an array, is told by its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pyg_direct.errors import NPZ, ArgumentError, whole_file


@contextmanager
def open_archive(file: Path) -> Iterator[Any]:
    """The arrays of an archive by name, each read when it is asked for.

    Raises:
        ArgumentError: the file is no archive of numbers, or damaged.
    """
    # Opened here, as NumPy leaves one that it cannot read open.
    with whole_file(file.name, NPZ, file), open(file, "rb") as opened:
        archive = np.load(opened, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ArgumentError(f"{file} must be a NumPy archive (.npz), got a single array")
        yield archive


def read_arrays(file: Path, names: Sequence[str], kinds: str = "iu") -> list[np.ndarray]:
    """The arrays `names` of an archive.

    Args:
        file: The archive.
        names: What to read.
        kinds: NumPy's letters of the kinds of numbers that they may be; "iu" for integers.

    Raises:
        ArgumentError: it is damaged, or an array is missing or of another kind.
    """
    with open_archive(file) as archive:
        missing = [name for name in names if name not in archive]
        if missing:
            raise ArgumentError(f"{file.name} must hold {', '.join(names)}, got no {', '.join(missing)}")
        arrays = [archive[name] for name in names]
    for name, array in zip(names, arrays, strict=True):
        # An array of nothing is of floats unless somebody says otherwise.
        if array.size and array.dtype.kind not in kinds:
            what = "integers" if kinds == "iu" else "real numbers"
            raise ArgumentError(f"{file.name} must hold {what} as {name}, got {array.dtype}")
    return arrays
