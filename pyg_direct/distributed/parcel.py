"""`Parcel`: rows of several kinds and attributes in bytes, for one receiver after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.runtime.raw import ALIGNMENT, align, as_bytes


class _Array(NamedTuple):
    """Rows of one attribute: number of the kind, name, dtype, shape and bytes of a row."""

    number: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    row_bytes: int


class Parcel(NamedTuple):
    """What rows of a request look like, known to both of its sides. One attribute alone is sent as it lies.

    Attributes:
        kinds: (kind, names of attributes) of all that is asked for.
        arrays: The attributes of all kinds.
    """

    kinds: list[tuple[Any, list[str]]]
    arrays: list[_Array]

    @classmethod
    def of(cls, kinds: Sequence[tuple[Any, Sequence[str]]], features: Mapping[Any, Mapping[str, Any]]) -> Parcel:
        """The parcel of some attributes.

        Args:
            kinds: (kind, names) in order.
            features: By kind and name, something with the dtype and the shape of the rows.
        """
        arrays = []
        for number, (kind, names) in enumerate(kinds):
            for name in names:
                feature = features[kind][name]
                shape = tuple(feature.shape[1:])
                arrays.append(_Array(number, name, feature.dtype, shape, math.prod(shape) * feature.dtype.itemsize))
        return cls([(kind, list(names)) for kind, names in kinds], arrays)

    @property
    def num_kinds(self) -> int:
        """K."""
        return len(self.kinds)

    @property
    def is_single(self) -> bool:
        """Whether it is one array of one kind."""
        return len(self.arrays) == 1 and self.num_kinds == 1

    def sizes(self, counts: np.ndarray) -> list[int]:
        """Bytes for each receiver, of rows by receiver and kind `[S, K]`."""
        found: list[int] = self._sizes(counts).sum(1).tolist()
        return found

    def _sizes(self, counts: np.ndarray) -> np.ndarray:
        """Bytes of each array for each receiver, int64 `[S, A]`."""
        sizes = counts[:, [array.number for array in self.arrays]] * np.array(
            [array.row_bytes for array in self.arrays], np.int64)  # fmt: skip
        return sizes if self.is_single else align(sizes)

    def pack(self, rows: Sequence[Tensor], counts: np.ndarray) -> Tensor:
        """The bytes of rows of all arrays, each for receiver after receiver."""
        if self.is_single:
            return as_bytes(rows[0])
        if not rows:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        pieces = []
        splits = [as_bytes(array).split((counts[:, about.number] * about.row_bytes).tolist())
                  for array, about in zip(rows, self.arrays, strict=True)]  # fmt: skip
        padding = rows[0].new_zeros(ALIGNMENT, dtype=torch.uint8)
        for receiver in range(len(counts)):
            for parts in splits:
                pieces.append(parts[receiver])
                if pad := -parts[receiver].numel() % ALIGNMENT:
                    pieces.append(padding[:pad])
        return torch.cat(pieces) if pieces else padding[:0]

    def open(self, messages: Sequence[Tensor], counts: np.ndarray) -> dict[tuple[int, str], list[Tensor]]:
        """Rows by number of kind and name, sender after sender, from one message of all or one of each.

        Args:
            messages: uint8.
            counts: Rows by sender and kind, int64 `[S, K]`.
        """
        if self.is_single and len(messages) == 1:
            array = self.arrays[0]
            return {(0, array.name): [_view(messages[0], array, int(counts.sum()))]}
        sizes = self._sizes(counts)
        found: dict[tuple[int, str], list[Tensor]] = {(array.number, array.name): [] for array in self.arrays}
        parts = messages[0].split(sizes.sum(1).tolist()) if len(messages) == 1 else messages
        for sender, message in enumerate(parts):
            at = 0
            for array, size in zip(self.arrays, sizes[sender].tolist(), strict=True):
                own = message[at : at + size]
                found[array.number, array.name].append(_view(own, array, int(counts[sender, array.number])))
                at += size
        return found


def _view(message: Tensor, array: _Array, count: int) -> Tensor:
    if count * array.row_bytes == 0:
        return torch.empty((count, *array.shape), dtype=array.dtype, device=message.device)
    return message[: count * array.row_bytes].view(array.dtype).view(count, *array.shape)
