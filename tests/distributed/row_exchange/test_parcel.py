"""Rows of several kinds in one run of bytes come out as they went in."""

import numpy as np
import pytest
import torch

from pyg_direct.distributed.row_exchange import Parcel

COUNTS = np.array([[3, 2], [0, 1], [5, 0]])


@pytest.mark.parametrize("dtypes", [
    (torch.bool, torch.float16, torch.int64), (torch.int64, torch.complex128, torch.complex128),
    (torch.uint8, torch.complex64, torch.complex128),
])  # fmt: skip
def test_rows_of_any_dtypes_lie_where_they_are_looked_for(dtypes):
    kinds, (of_a, also_of_a, of_b) = [("a", ["x", "y"]), ("b", ["x"])], dtypes
    rows = [torch.arange(8).view(8, 1).to(of_a), torch.arange(24).view(8, 3).to(also_of_a), torch.arange(3).to(of_b)]
    parcel = Parcel.of(kinds, {"a": {"x": rows[0], "y": rows[1]}, "b": {"x": rows[2]}})

    packed = parcel.pack(rows, COUNTS)
    found = parcel.open([packed], COUNTS)

    assert packed.numel() == sum(parcel.sizes(COUNTS))
    for key, expected in zip([(0, "x"), (0, "y"), (1, "x")], rows, strict=True):
        assert torch.equal(torch.cat(found[key]), expected)
