import pytest
import torch

from pyg_direct.kernels.batch_counters import NO_POSITION
from pyg_direct.ops.rows.gather_rows import MOST_TABLES, NarrowReader, gather_rows, is_narrow
from tests.poison import poisoned_memory

# Dtype and shape of a row, of 1 to 16 bytes.
KINDS = [(torch.bool, ()), (torch.int16, ()), (torch.float32, (1,)), (torch.int64, ()), (torch.int32, (2, 2)),
         (torch.uint8, (2,)), (torch.complex128, ()), (torch.bfloat16, (4,))]  # fmt: skip
NUM_ROWS = 50


def make_tables(kinds, device, num_rows=NUM_ROWS):
    tables = []
    for number, (dtype, row) in enumerate(kinds):
        values = torch.randint(0, 2 if dtype == torch.bool else 100, (num_rows, *row)) + number % 2
        tables.append(values.to(dtype).to(device))
    return tables


def make_errors(device):
    pinned = device.type == "cuda" and torch.cuda.is_available()
    return torch.full((1,), NO_POSITION, dtype=torch.int64, pin_memory=pinned)


@pytest.mark.parametrize("first", range(0, len(KINDS), 2))
@pytest.mark.parametrize("count", [2, 3, MOST_TABLES])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_those_of_each_table(device, first, count, dtype):
    tables = make_tables([KINDS[(first + n) % len(KINDS)] for n in range(count)], device)
    ids = torch.randint(NUM_ROWS, (777,), dtype=dtype, device=device)

    with poisoned_memory():
        got = NarrowReader(tables, make_errors(device)).read(ids)

    for rows, table in zip(got, tables, strict=True):
        assert (rows.dtype, rows.shape, rows.is_contiguous()) == (table.dtype, (777, *table.shape[1:]), True)
        assert torch.equal(rows, gather_rows(table, ids))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_rows_are_written_by_themselves(device, dtype):
    tables = [torch.ones(NUM_ROWS, dtype=dtype, device=device) for _ in range(3)]
    first, second, third = NarrowReader(tables, make_errors(device)).read(torch.arange(5, device=device))
    learned = torch.nn.Parameter(torch.ones(5, device=device))

    first[2:] = 0
    if dtype.is_floating_point:
        second.mul_(learned)

    assert (first.sum(), second.sum(), third.sum()) == (2, 5, 5)
    assert second.requires_grad == dtype.is_floating_point


def test_no_ids_give_no_rows(device):
    tables = make_tables(KINDS[:3], device)

    got = NarrowReader(tables, make_errors(device)).read(torch.empty(0, dtype=torch.int64, device=device))

    assert [rows.shape for rows in got] == [(0,), (0,), (0, 1)]


@pytest.mark.gpu
def test_an_id_out_of_range_gives_zeros_and_is_told():
    device, errors = torch.device("cuda"), make_errors(torch.device("cuda"))
    tables = make_tables(KINDS[2:6], device)
    ids = torch.tensor([3, -1, 7, NUM_ROWS], device=device)

    got = NarrowReader(tables, errors).read(ids)
    torch.cuda.synchronize()

    assert errors.tolist() == [1]
    for rows, table in zip(got, tables, strict=True):
        assert torch.equal(rows[[0, 2]], table[[3, 7]])
        assert not rows[[1, 3]].any()


@pytest.mark.parametrize(("dtype", "row", "fits"), [(torch.int64, (2,), True), (torch.float32, (3,), False),
                                                    (torch.float32, (8,), False), (torch.bool, (), True),
                                                    (torch.float32, (0,), False)])  # fmt: skip
def test_which_tables_may_be_read_together(dtype, row, fits):
    assert is_narrow(torch.zeros(5, *row, dtype=dtype)) == fits


def test_a_table_that_is_not_aligned_is_read_alone():
    # torch allocates at multiples of 16 bytes at least; these rows of 16 bytes begin at 8.
    assert not is_narrow(torch.zeros(9, dtype=torch.int64)[1:].view(4, 2))
