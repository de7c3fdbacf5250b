"""Rows of graphs that lie side by side in tables are copied as by concatenation, one graph after the other."""

import pytest
import torch

from pyg_direct.ops.rows import graph_rows
from pyg_direct.ops.rows.graph_rows import GraphRows, GraphRowsOnGpu, LoopChoice
from tests import cuda_on_cpu

SIZES = torch.tensor([[3, 0], [0, 2], [1, 5], [4, 1]])
FIRSTS = SIZES.cumsum(0) - SIZES
NUMBERS = torch.tensor([2, 0, 1, 2])


GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(params=["loops", "kernel", *GPU])
def place(request, monkeypatch):
    """Device of the tables; the kernel runs on a CPU too."""
    if request.param == "kernel":
        library = request.getfixturevalue("narrow_library")
        monkeypatch.setattr(graph_rows, "grid_for", lambda *args: 1)
        monkeypatch.setattr(graph_rows, "run_gpu", lambda kernel, grid, *args: cuda_on_cpu.run(library, kernel, args))
    return request.param


def make_rows(place="loops", numbers=NUMBERS, spans=None):
    spans = torch.cat([FIRSTS, SIZES], 1) if spans is None else spans
    if place == "loops":
        return GraphRows(numbers, spans)
    return GraphRowsOnGpu(numbers, spans, torch.device("cpu" if place == "kernel" else place))


def put(tensor, place):
    return tensor.cuda() if place == "cuda" else tensor


def slice_each(table, dim, group):
    return [table.narrow(dim, int(FIRSTS[n, group]), int(SIZES[n, group])) for n in NUMBERS.tolist()]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float16, torch.bool])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_along_any_dimension_are_copied(place, dim, dtype):
    shapes = [(*(2, 3, 4)[:dim], total, *(2, 3, 4)[dim + 1 :]) for total in SIZES.sum(0).tolist()]
    tables = [torch.randint(2, shape).to(dtype) for shape in shapes]
    rows = make_rows(place)

    got = [rows.read(put(table, place), dim, group) for group, table in enumerate(tables)]
    rows.finish()
    got = [part.cpu() for part in got]

    for group, table in enumerate(tables):
        assert torch.equal(got[group], torch.cat(slice_each(table, dim, group), dim))


def test_a_row_of_each_graph_and_the_places_of_graphs(place):
    table, rows = torch.rand(4, 2), make_rows(place)

    got, numbers, ptr = rows.read(put(table, place), 0, None), rows.number_rows(0), rows.list_ptr(1)
    rows.finish()

    assert torch.equal(got.cpu(), table[NUMBERS])
    assert rows.ptr.tolist() == [[0, 1, 4, 4, 5], [0, 5, 5, 7, 12]]
    assert rows.totals == [5, 12]
    assert numbers.tolist() == [0, 1, 1, 1, 3]
    assert ptr.tolist() == [0, 5, 5, 7, 12]


@pytest.mark.parametrize("lines", [None, 1, 3])
def test_first_rows_of_graphs_are_added(place, lines):
    table = torch.randint(9, (SIZES[:, 1].sum(),) if lines is None else (lines, SIZES[:, 1].sum()))
    rows = make_rows(place)

    got = rows.read(put(table, place), table.dim() - 1, 1, shift=0)
    rows.finish()

    parts = zip(slice_each(table, -1, 1), [0, 1, 4, 4], strict=True)
    assert torch.equal(got.cpu(), torch.cat([part + first for part, first in parts], -1))


@pytest.mark.parametrize("lines", [None, 1, 3])
def test_numbers_of_graphs_are_added(place, lines):
    table = torch.randint(9, (SIZES[:, 1].sum(),) if lines is None else (lines, SIZES[:, 1].sum()))
    shifts = torch.randint(9, (4, 1 if lines is None else lines))

    rows = make_rows(place)
    got = rows.read_shifted(put(table, place), 1, shifts)
    rows.finish()
    got = got.cpu()

    parts = zip(slice_each(table, -1, 1), shifts, strict=True)
    assert torch.equal(got, torch.cat([part + (own[0] if lines is None else own[:, None]) for part, own in parts], -1))


def test_rows_that_nobody_keeps_are_written_to_memory_of_their_own():
    table, rows = torch.rand(8, 1000), make_rows()

    for _ in range(3):
        rows.read(table, 0, 0)
    others = [torch.zeros(5, 1000) for _ in range(3)]
    rows.finish()

    assert not any(other.any() for other in others)


def test_many_graphs_are_copied_by_all_threads_alike(place):
    # One after the other takes a kernel on a CPU long.
    count, width = (300, 5) if place == "kernel" else (3000, 40)
    numbers, sizes = torch.randint(50, (count,)), torch.randint(9, (50, 1))
    spans = torch.cat([sizes.cumsum(0) - sizes, sizes], 1)
    table = torch.rand(int(sizes.sum()), width)
    rows = make_rows(place, numbers, spans)

    got = rows.read(put(table, place), 0, 0)
    rows.finish()
    got = got.cpu()

    assert torch.equal(got, torch.cat([table[spans[n, 0] : spans[n].sum()] for n in numbers.tolist()]))


def test_loops_follow_after_torch_has_joined_for_a_while(monkeypatch):
    monkeypatch.setattr(LoopChoice, "seconds", 0.0)
    with LoopChoice() as first:
        pass
    assert not first
    assert LoopChoice.seconds > 0
    for enough, modules in ((graph_rows._TORCH_SECONDS, {"numba": None}), (graph_rows._LONE_SECONDS, {})):
        monkeypatch.setattr(graph_rows, "sys", type("sys", (), {"modules": modules}))
        monkeypatch.setattr(LoopChoice, "seconds", enough)
        with LoopChoice() as later:
            pass
        assert later
        monkeypatch.setattr(LoopChoice, "seconds", enough - 1e-3)
        with LoopChoice() as before:
            pass
        assert not before


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_rows_at_any_address_are_copied(place, offset):
    """Items are as large as the address allows."""
    memory = torch.randint(255, (offset + 5 * 24,)).to(torch.uint8)
    table, rows = memory[offset:].view(5, 24), make_rows(place)

    got = rows.read(put(memory, place)[offset:].view(5, 24), 0, 0)
    rows.finish()

    assert torch.equal(got.cpu(), torch.cat(slice_each(table, 0, 0)))


def test_batches_without_rows_write_nothing(place):
    rows = make_rows(place, torch.tensor([3]), torch.zeros(4, 4, dtype=torch.int64))

    got = rows.read(put(torch.zeros(0, 3), place), 0, 0), rows.number_rows(1), rows.list_ptr(0)
    rows.finish()

    assert [tuple(part.shape) for part in got] == [(0, 3), (0,), (2,)]
    assert got[2].tolist() == [0, 0]
