"""Rows are written at their ids, bit for bit; other rows stay unchanged."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.kernels.batch_counters import NO_POSITION
from pyg_direct.ops.rows.gather_rows import scatter_rows
from pyg_direct.ops.run_kernel import runs_on_gpu
from tests.features.contract import DTYPES, ROWS, bytes_of, make_rows
from tests.reference import scatter as reference


@given(ids=st.lists(st.integers(0, 39), max_size=90))
def test_matches_reference(device, ids):
    table, rows = make_rows(dtype=torch.int32), make_rows(len(ids), dtype=torch.int32)
    expected = reference.scatter_rows(table.numpy(), ids, rows.numpy())
    got = table.to(device)

    scatter_rows(got, torch.tensor(ids, dtype=torch.int64, device=device), rows.to(device))

    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_dtype(device, dtype):
    table, rows = make_rows(dtype=dtype), make_rows(4, dtype=dtype)
    expected = reference.scatter_rows(bytes_of(table).numpy(), [7, 0, 7, 39], bytes_of(rows).numpy())
    got = table.to(device)

    scatter_rows(got, torch.tensor([7, 0, 7, 39], dtype=torch.int32, device=device), rows.to(device))

    assert torch.equal(bytes_of(got), torch.from_numpy(expected))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_of_any_shape(device, row):
    table, rows = make_rows(row=row), make_rows(3, row=row)
    expected = reference.scatter_rows(bytes_of(table).numpy(), [7, 0, 39], bytes_of(rows).numpy())
    got = table.to(device)

    scatter_rows(got, torch.tensor([7, 0, 39], device=device), rows.to(device), is_unique=True)

    assert torch.equal(bytes_of(got), torch.from_numpy(expected))


@pytest.mark.parametrize("bad", [40, -1, 2**40])
def test_what_is_no_id_is_not_written(device, bad):
    table = torch.zeros(40, 3, device=device)
    ids, rows = torch.tensor([3, bad, 5], device=device), torch.ones(3, 3, device=device)
    errors = torch.full((1,), NO_POSITION, dtype=torch.int64, device=device)

    if runs_on_gpu(ids) and table.is_cuda:
        scatter_rows(table, ids, rows, errors=errors)
        assert errors.item() == 1
        assert table.sum(1).nonzero().view(-1).tolist() == [3, 5]
    else:
        with pytest.raises(IdError, match=r"ids must lie in \[0, 40\)"):
            scatter_rows(table, ids, rows, errors=errors)
        assert table.sum() == 0


@pytest.mark.parametrize(("shape", "dtype"), [((2, 4), torch.float32), ((2, 3), torch.float64)])
def test_other_rows_are_refused(device, shape, dtype):
    with pytest.raises(ArgumentError, match=r"rows must be \(2, 3\) of torch.float32"):
        scatter_rows(torch.zeros(40, 3, device=device), torch.tensor([1, 2], device=device),
                     torch.zeros(shape, dtype=dtype, device=device))  # fmt: skip


def test_a_strided_table_is_refused(device):
    with pytest.raises(ArgumentError, match="table must be contiguous"):
        scatter_rows(torch.zeros(3, 40, device=device).t(), torch.tensor([1], device=device),
                     torch.zeros(1, 3, device=device))  # fmt: skip
