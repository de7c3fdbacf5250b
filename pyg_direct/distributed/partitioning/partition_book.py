"""`Book`: the owner of each node of a type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.sampling.join_remote_edges import find_buckets

# Constants of splitmix64's finaliser, as signed words.
_MIX_0 = -0x40A7B892E31B1A47
_MIX_1 = -0x6B2FB644ECCEEE15
_MAX_PARTS = 1 << 15


@dataclass(frozen=True)
class Book:
    """Owner of each node of a type: by a hash of its id, by ranges of ids, or by a table.

    Attributes:
        num_nodes, num_parts: N and P.
        bounds: First node of each part and N, int64 `[P + 1]`, for ranges.
        table: Part of each node, uint8 or int16 `[N]`, for a table. Without both, a hash assigns nodes.
    """

    num_nodes: int
    num_parts: int
    bounds: Tensor | None = None
    table: Tensor | None = None

    def __post_init__(self) -> None:
        check_num_parts(self.num_parts)
        if self.bounds is not None:
            bounds = self.bounds
            is_ascending = bounds.shape == (self.num_parts + 1,) and bool((bounds.diff() >= 0).all())
            if not is_ascending or int(bounds[0]) != 0 or int(bounds[-1]) != self.num_nodes:
                raise ArgumentError(f"bounds must ascend from 0 to {self.num_nodes} in {self.num_parts} steps, got "
                                    f"{bounds.tolist()}")  # fmt: skip
        if self.table is not None:
            if self.table.shape != (self.num_nodes,):
                raise ArgumentError(f"table must have shape ({self.num_nodes},), got {tuple(self.table.shape)}")
            if self.num_nodes and not 0 <= int(self.table.min()) <= int(self.table.max()) < self.num_parts:
                raise ArgumentError(f"table must hold parts in [0, {self.num_parts}), got {int(self.table.min())} to "
                                    f"{int(self.table.max())}")  # fmt: skip

    @property
    def kind(self) -> str:
        """Name of the rule: `hash`, `range` or `table`."""
        return "hash" if self.bounds is None and self.table is None else "range" if self.table is None else "table"

    @classmethod
    def by_range(cls, num_nodes: int, num_parts: int) -> Book:
        """Make a book of equal ranges of ids."""
        check_num_parts(num_parts)
        bounds = torch.arange(num_parts + 1, dtype=torch.int64, device="cpu") * num_nodes // num_parts
        return cls(num_nodes, num_parts, bounds=bounds)

    @classmethod
    def by_table(cls, table: Any, num_parts: int) -> Book:
        """Make a book of given parts of all nodes, integers `[N]`.

        Raises:
            ArgumentError, ArgumentTypeError: a part is out of range, or the dtype is no integer.
        """
        check_num_parts(num_parts)
        table = table if isinstance(table, Tensor) else torch.as_tensor(table, device="cpu")
        if table.dtype == torch.bool or table.is_floating_point() or table.is_complex():
            raise ArgumentTypeError(f"table must hold integers, got {table.dtype}")
        # Compared in int64: a narrower dtype would wrap invalid numbers around to valid parts.
        table = table.long()
        if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < num_parts:
            raise ArgumentError(f"table must hold parts in [0, {num_parts}), got {int(table.min())} to "
                                f"{int(table.max())}")  # fmt: skip
        return cls(len(table), num_parts, table=table.to(table_dtype(num_parts)))

    def owners(self, ids: Tensor) -> Tensor:
        """Return the part of each node, int64 `[n]`, for ids int64 `[n]`, on their device."""
        if self.table is not None:
            return self._on(ids.device, "table")[ids].long()
        if self.bounds is not None:
            return torch.searchsorted(self._on(ids.device, "bounds")[1:-1], ids, right=True)
        mixed = _shift(ids, 30, ids) * _MIX_0
        mixed = _shift(mixed, 27, mixed) * _MIX_1
        return (((mixed >> 32) & 0x7FFFFFFF) * self.num_parts) >> 31

    def find_buckets(self, ids: Tensor, own: int, scale: int, add: int, keys: Tensor) -> None:
        """Write the bucket keys of requested nodes (see `ops/sampling/join_remote_edges.py`)."""
        find_buckets(ids, self.num_parts, *self.find_arrays(ids.device), own, scale, add, keys)

    def find_arrays(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (first nodes of all parts but the first, part of each node) on a device, as kernels find owners; an
        unused one is empty.
        """
        bounds = torch.empty(0, dtype=torch.int64, device=device) if self.bounds is None else self._on(
            device, "bounds")[1:-1]  # fmt: skip
        table = torch.empty(0, dtype=torch.uint8, device=device) if self.table is None else self._on(device, "table")
        return bounds, table

    def _on(self, device: torch.device, name: str) -> Tensor:
        """Return `bounds` or `table` on a device, copied there once."""
        own: Tensor = getattr(self, name)
        if own.device == device:
            return own
        copies: dict[Any, Tensor] = self.__dict__.setdefault("_copies", {})
        if (name, device) not in copies:
            copies[name, device] = own.to(device)
        return copies[name, device]

    def owners_between(self, begin: int, end: int) -> np.ndarray:
        """Return the parts of the nodes begin, ..., end - 1, int64."""
        return self.owners(torch.arange(begin, end, device="cpu")).numpy()


def check_num_parts(num_parts: Any) -> int:
    """Check a number of parts, which may be a NumPy integer."""
    is_number = isinstance(num_parts, (int, np.integer)) and not isinstance(num_parts, bool)
    if not is_number or not 1 <= num_parts < _MAX_PARTS:
        raise ArgumentError(f"num_parts must be an integer in [1, {_MAX_PARTS}), got {num_parts!r}")
    return int(num_parts)


def table_dtype(num_parts: int) -> torch.dtype:
    """Return the smallest dtype that holds a part."""
    return torch.uint8 if num_parts <= 256 else torch.int16


def _shift(value: Tensor, bits: int, other: Tensor) -> Tensor:
    """Compute `other` xor the logical right shift of `value`."""
    return other ^ ((value >> bits) & ((1 << (64 - bits)) - 1))
