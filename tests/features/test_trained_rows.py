"""Rows that training reads and replaces, with hot copies over their table."""

import pytest
import torch

from pyg_direct.errors import ArgumentError, DeviceError, MemoryLimitError
from pyg_direct.features import trained_rows
from pyg_direct.features.trained_rows import (
    HotRows,
    TrainedRows,
    allocate_rows,
    choose_hot_rows,
    find_rows,
    hold_rows,
    place_trained,
)
from pyg_direct.runtime.cuda.memory import allocate

NUM_ROWS = 40


def make_rows(device, hot_ids=(), **options):
    table = torch.arange(NUM_ROWS * 3.0, device=device).view(NUM_ROWS, 3)
    return TrainedRows(table, None, choose(hot_ids, device), **options)


def choose(ids, device):
    return HotRows.of(torch.tensor(ids, dtype=torch.int64, device=device), NUM_ROWS)


@pytest.fixture(params=[(), (0, 5, 39), tuple(range(NUM_ROWS))], ids=["none hot", "some hot", "all hot"])
def hot_ids(request):
    return request.param


@pytest.mark.parametrize("writes_through", [False, True])
def test_written_rows_are_read_again(device, hot_ids, writes_through):
    rows = make_rows(device, hot_ids, writes_through=writes_through)
    expected = rows.table.clone()
    ids = torch.tensor([5, 39, 7, 0], device=device)
    expected[ids] = new = torch.randn(4, 3, device=device)

    rows.write(ids, new)

    every = torch.arange(NUM_ROWS, device=device)
    assert torch.equal(rows.read(every), expected)
    assert torch.equal(rows.list_rows(), expected)


def test_a_table_that_is_written_through_is_complete_at_any_time(device, hot_ids):
    rows = make_rows(device, hot_ids)
    table = rows.table

    rows.write(torch.tensor([5], device=device), torch.full((1, 3), -1.0, device=device))

    assert table[5].tolist() == [-1] * 3


def test_numbers_of_an_optimizer_are_written_where_they_are_read(device):
    rows = make_rows(device, (5,)).make_like(2.0)

    rows.write(torch.tensor([5, 6], device=device), torch.full((2, 3), 7.0, device=device))

    assert rows.num_hot_rows == 1
    assert rows.table[[5, 6]].tolist() == [[2] * 3, [7] * 3]
    assert rows.list_rows()[[4, 5, 6]].tolist() == [[2] * 3, [7] * 3, [7] * 3]


def test_ids_that_stand_for_no_row_write_none(device, hot_ids):
    rows = make_rows(device, hot_ids)
    expected = rows.table.clone()

    rows.write(torch.tensor([-1, -1], device=device), torch.zeros(2, 3, device=device))

    assert torch.equal(rows.list_rows(), expected)


def test_hot_copies_follow_writes_of_torch(device, hot_ids):
    rows = make_rows(device, hot_ids)
    ids = torch.tensor([0, 1], device=device)

    rows.table.zero_()
    rows.refresh()

    assert rows.read(ids).tolist() == [[0] * 3] * 2


def test_torch_sees_what_was_written(device):
    rows = make_rows(device, (5,))
    before = rows.table._version

    rows.note_written()

    assert rows.version == rows.table._version > before


def test_rows_are_loaded_and_their_copies_too(device, hot_ids):
    rows = make_rows(device, hot_ids, writes_through=False)

    rows.load(torch.full((NUM_ROWS, 3), 4.0).double())

    assert rows.read(torch.tensor([5, 6], device=device)).tolist() == [[4] * 3] * 2
    assert rows.list_rows().unique().tolist() == [4]
    with pytest.raises(ArgumentError, match=r"rows must have shape \(40, 3\), got \(39, 3\)"):
        rows.load(torch.zeros(39, 3))


def test_a_parameter_leads_to_its_rows_until_its_memory_is_another(device):
    parameter = torch.nn.Parameter(torch.zeros(NUM_ROWS, 2, device=device))
    rows = TrainedRows(parameter.detach(), hot_rows=choose((1,), device))
    hold_rows(parameter, rows)

    found = find_rows(parameter)
    parameter.data = torch.ones(NUM_ROWS, 2, device=device)
    other = find_rows(parameter)

    assert found is rows
    assert other.table.data_ptr() == parameter.data_ptr()
    assert other.num_hot_rows == 0


def test_memory_that_no_gpu_reads_is_named(monkeypatch):
    monkeypatch.setattr(trained_rows, "allocate_or_fall_back", lambda num_bytes, *_: allocate(num_bytes, "cpu"))

    with pytest.raises(DeviceError, match="placement='unified' needs host memory that cuda:0 reads, and none could"):
        allocate_rows(torch.Size((4, 2)), torch.float32, "unified", torch.device("cuda", 0))


@pytest.mark.parametrize(("free", "place"), [(30_000, "cuda"), (20_000, "pinned")])
def test_tables_lie_in_gpu_memory_if_their_optimizer_fits_too(monkeypatch, free, place):
    monkeypatch.setattr(trained_rows, "free_bytes", lambda index: free)
    monkeypatch.setattr(trained_rows, "budget_of", lambda free: free)
    monkeypatch.setattr(trained_rows, "choose_host_memory", lambda index: "pinned")
    monkeypatch.setattr(trained_rows, "allocate_rows", lambda shape, dtype, placement, device: placement)

    assert place_trained(torch.Size((1000, 2)), torch.float32, "auto", torch.device("cuda", 0)) == place


@pytest.mark.parametrize(("asked", "ids", "misses"), [(0, None, 1), ("20%", [2, 3], 0.25), ("100%", [*range(10)], 0)])
def test_hot_rows_are_those_with_the_highest_scores(monkeypatch, asked, ids, misses):
    monkeypatch.setattr(trained_rows, "fit_budget", lambda budget, asked, device: budget)
    scores = torch.tensor([0, 0, 2, 4, 1, 1, 0, 0, 0, 0])

    found = choose_hot_rows(torch.zeros(10, 3), asked, scores, None)

    if ids is None:
        assert found is None
    else:
        assert (found.ids.tolist(), found.misses) == (ids, pytest.approx(misses))


def test_hot_rows_without_room_are_named(monkeypatch):
    def run_out(*args, **options):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(trained_rows, "gather_rows", run_out)

    with pytest.raises(MemoryLimitError, match=r"device_cache_size must leave GPU memory for 2 hot rows, .*: out of m"):
        make_rows(torch.device("cpu"), (1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
def test_rows_of_a_gpu_are_seen_from_the_cpu(placement):
    gpu = torch.device("cuda", torch.cuda.current_device())
    table, block = place_trained(torch.Size((1000, 17)), torch.float32, placement, gpu)
    hot_rows = HotRows.of(torch.arange(0, 1000, 7, device=gpu), 1000)
    rows = TrainedRows(table.zero_(), block, hot_rows, writes_through=False)
    ids = torch.randperm(1000, device=gpu)
    new = torch.randn(1000, 17, device=gpu)

    rows.write(torch.cat([ids, ids.new_full((3,), -1)]), torch.cat([new, new[:3]]))

    assert rows.placement == placement
    assert torch.equal(rows.read(ids), new)
    assert torch.equal(rows.list_rows()[ids.cpu()].cpu(), new.cpu())
    assert rows.list_rows().is_cuda == (placement == "cuda")
