"""Rows read batch after batch by a launcher that knows its table."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pyg_direct.kernels.batch_counters import NO_POSITION
from pyg_direct.kernels.rows.gather import find_block
from pyg_direct.ops.rows.gather_rows import FEW_BYTES, Directory, RowReader, select_rows
from tests.poison import poisoned_memory

TABLES = {
    "float32, 512 B": lambda n: torch.randn(n, 128),
    "float32, 12 B": lambda n: torch.randn(n, 3),
    "float16, 2 B": lambda n: torch.randn(n).half(),
    "float16, 6 B": lambda n: torch.randn(n, 3, 1).half(),
    "bfloat16, 32 B": lambda n: torch.randn(n, 16).bfloat16(),
    "int64": lambda n: torch.arange(n),
    "bool": lambda n: torch.arange(n) % 3 == 0,
    "bool, 5 B": lambda n: torch.rand(n, 5) < 0.5,
    "int8 images": lambda n: torch.arange(n * 12).view(n, 2, 3, 2).to(torch.int8),
    "complex64": lambda n: torch.randn(n, 2, dtype=torch.complex64),
    "complex128": lambda n: torch.randn(n, dtype=torch.complex128),
    "no width": lambda n: torch.empty(n, 0),
}


@pytest.fixture
def errors():
    return torch.full((1,), NO_POSITION, dtype=torch.int64, pin_memory=True)


@pytest.mark.parametrize("count", [0, 1, 1000])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.gpu
def test_rows_are_those_of_the_ids(name, count, errors):
    table = TABLES[name](300).cuda()
    ids = torch.randint(300, (count,), device="cuda")
    reader = RowReader(table, None, None, errors, None)

    with poisoned_memory():
        got = [reader.read(ids) for _ in range(2)]

    for rows in got:
        assert rows.dtype == table.dtype
        assert torch.equal(rows, table[ids])
    assert errors.item() == NO_POSITION


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 1200))
def test_every_block_does_one_piece_of_work(blocks, strands):
    found = [int(find_block(np.int32(block), np.int32(blocks), np.int32(strands))) for block in range(blocks)]

    assert sorted(found) == list(range(blocks))
    # The first ones begin a part of the work each.
    length = blocks // strands
    assert found[:strands] == ([length * part for part in range(strands)] if length else list(range(blocks)))


@pytest.mark.parametrize("count", [0, 1, 1000, 40_001])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.gpu
def test_rows_are_read_from_many_places_of_the_list(name, count, errors):
    table = TABLES[name](300).cuda()
    ids = torch.randint(300, (count,), device="cuda").sort().values
    reader = RowReader(table, None, None, errors, None, strands=64)

    with poisoned_memory():
        got = reader.read(ids)

    assert torch.equal(got, table[ids])
    assert errors.item() == NO_POSITION


@pytest.mark.parametrize("max_blocks", [None, 2])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.gpu
def test_hot_rows_and_cold_rows_come_in_one_read(name, max_blocks, errors):
    table = TABLES[name](300).cuda()
    hot_ids, ids = torch.randperm(300, device="cuda")[:70].sort().values, torch.randint(300, (1000,), device="cuda")
    reader = RowReader(table[hot_ids], table, Directory.of(hot_ids, 300), errors, max_blocks)

    got = reader.read(ids)

    assert torch.equal(got, table[ids])


@pytest.mark.gpu
def test_an_id_outside_is_noted_and_reads_zeros(errors):
    table = torch.ones(10, 4, device="cuda")
    reader = RowReader(table, None, None, errors, None)

    rows = reader.read(torch.tensor([3, 10, 5, -1], device="cuda"))
    torch.cuda.synchronize()

    assert errors.item() == 1
    assert rows[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("name", TABLES)
def test_few_rows_of_the_host_come_in_one_step(name, count):
    table, ids = TABLES[name](300), torch.randint(300, (count,))

    with poisoned_memory():
        got = select_rows(table, ids)

    assert got.dtype == table.dtype
    assert torch.equal(got, table[ids])
    assert got.is_contiguous()


@pytest.mark.parametrize("bad", [-1, 300])
def test_rows_that_are_none_are_left_to_others(bad):
    assert select_rows(torch.arange(300), torch.tensor([3, bad])) is None


def test_many_rows_are_left_to_others():
    table = torch.zeros(10, 16)

    assert select_rows(table, torch.zeros(FEW_BYTES // 64, dtype=torch.int64)) is not None
    assert select_rows(table, torch.zeros(FEW_BYTES // 64 + 1, dtype=torch.int64)) is None
