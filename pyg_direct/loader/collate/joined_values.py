"""Values of an attribute of a list of graphs, as one table: joined, or found where they lie together already."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import islice, repeat

import numpy as np
import torch
from torch import Tensor

# Values that are joined at a time: their copy is small beside the table.
_TOGETHER = 64
# Least share of a tensor's rows that its views have, if it is the table itself; a GPU keeps all of its rows.
_SHARE = 0.5


def count_rows(values: Sequence[Tensor], dim: int) -> Tensor:
    """Count the rows of each value along a dimension, int64 `[G]`."""
    return torch.from_numpy(np.fromiter((value.size(dim) for value in values), np.int64, len(values)))


def join_rows(values: Sequence[Tensor], dim: int, sizes: Tensor) -> tuple[Tensor, Tensor | None]:
    """Join values along a dimension, without a second list of them.

    The graphs of an `InMemoryDataset`, or of a part of it, are views of its joined tensors: these are the table, which
    takes no memory.

    Args:
        values: Of one dtype, one device, and one width in all other dimensions.
        dim: At least 0.
        sizes: Result of `count_rows`.

    Returns:
        The table, and the first row of each value in it, int64 `[G]`; None if values follow each other from row 0.
    """
    found = _find_whole(values, dim, sizes)
    if found is not None:
        return found
    first = values[0]
    table = first.new_empty([*first.shape[:dim], int(sizes.sum()), *first.shape[dim + 1 :]])
    at = 0
    for part in _cut(values):
        joined = torch.cat(part, dim)
        table.narrow(dim, at, joined.size(dim)).copy_(joined)
        at += joined.size(dim)
    return table, None


def stack_values(values: Sequence[Tensor]) -> Tensor:
    """Stack values of one shape along a new first dimension, without a second list of them."""
    table = values[0].new_empty([len(values), *values[0].shape])
    for number, part in enumerate(_cut(values)):
        torch.stack(part, out=table.narrow(0, number * _TOGETHER, len(part)))
    return table


def _cut(values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    items = iter(values)
    while part := list(islice(items, _TOGETHER)):
        yield part


def _find_whole(values: Sequence[Tensor], dim: int, sizes: Tensor) -> tuple[Tensor, Tensor] | None:
    """Find the tensor that the values are ranges of rows of, and the first row of each."""
    whole, first = values[0]._base, values[0]
    if whole is None or type(whole) is not Tensor or whole.requires_grad or whole.is_inference():
        return None
    is_like = (whole.dtype, whole.device, whole.layout) == (first.dtype, first.device, first.layout)
    if not is_like or not whole.is_contiguous() or whole.is_conj() or whole.is_neg() or whole.dim() != first.dim():
        return None
    step, rows = whole.stride(dim), whole.size(dim)
    shape = [*whole.shape[:dim], *whole.shape[dim + 1 :]]
    if step == 0 or shape != [*first.shape[:dim], *first.shape[dim + 1 :]] or int(sizes.sum()) < _SHARE * rows:
        return None
    if not all(map(operator.is_, map(operator.attrgetter("_base"), values), repeat(whole))):
        return None
    if {value.stride() for value in values} != {whole.stride()} or any(value.is_neg() for value in values):
        return None
    offsets = torch.from_numpy(np.fromiter((value.storage_offset() for value in values), np.int64, len(values)))
    offsets -= int(whole.storage_offset())
    begins = offsets // step
    is_range = (begins * step == offsets) & (begins >= 0) & (begins + sizes <= rows)
    return (whole, begins) if bool(is_range.all()) else None
