"""Rows of several batches of graphs are copied at once as those of each batch alone."""

import numpy as np
import pytest
import torch

from pyg_direct.ops.rows import graph_rows
from pyg_direct.ops.rows.graph_rows import BatchesOfGraphs, RowBegins, RowNumbers, TableRows
from tests import cuda_on_cpu

SIZES = torch.tensor([[3, 0], [0, 2], [1, 5], [4, 1]])
FIRSTS = SIZES.cumsum(0) - SIZES
SPANS = torch.cat([FIRSTS, SIZES], 1)
# Batches of several sizes, of one graph, and of graphs that come twice.
BATCHES = [torch.tensor([2, 0, 1, 2]), torch.tensor([1]), torch.tensor([3, 1, 0])]
EVEN = [torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([0, 0])]
PLENTY = 1 << 40
GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(params=["kernel", *GPU])
def device(request, monkeypatch):
    """Device of the tables; the kernel runs on a CPU too."""
    if request.param == "cuda":
        return torch.device("cuda", 0)
    library = request.getfixturevalue("narrow_library")
    monkeypatch.setattr(graph_rows, "grid_for", lambda *args: 1)
    monkeypatch.setattr(graph_rows, "run_gpu", lambda kernel, grid, *args: cuda_on_cpu.run(library, kernel, args))
    return torch.device("cpu")


def slice_each(table, dim, group, numbers):
    return [table.narrow(dim, int(FIRSTS[n, group]), int(SIZES[n, group])) for n in numbers.tolist()]


def read(device, layouts, batches=BATCHES, most=PLENTY):
    made = BatchesOfGraphs(SPANS, layouts, device).read(batches, most)
    return [[value.cpu() for value in values] for values in made.values], made


@pytest.mark.parametrize("batches", [BATCHES, EVEN, BATCHES[1:2]], ids=["sizes", "even", "one"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float16, torch.bool, torch.complex128])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_along_any_dimension_are_copied(device, dim, dtype, batches):
    shapes = [(*(2, 3, 4)[:dim], total, *(2, 3, 4)[dim + 1 :]) for total in SIZES.sum(0).tolist()]
    tables = [torch.randint(2, shape).to(dtype) for shape in shapes]

    got, made = read(device, [TableRows(table.to(device), dim, group) for group, table in enumerate(tables)], batches)

    for own, values, numbers in zip(got, made.values, batches, strict=True):
        for group, table in enumerate(tables):
            assert torch.equal(own[group], torch.cat(slice_each(table, dim, group, numbers), dim))
            assert values[group].is_contiguous()


@pytest.mark.parametrize("batches", [BATCHES, EVEN], ids=["sizes", "even"])
def test_a_row_of_each_graph_and_the_places_of_graphs(device, batches):
    table = torch.rand(4, 2)

    got, made = read(device, [TableRows(table.to(device), 0, None), RowNumbers(0), RowBegins(1)], batches)

    for place, (own, numbers) in enumerate(zip(got, batches, strict=True)):
        sizes = SIZES[numbers]
        begins = torch.cat([torch.zeros(1, 2, dtype=torch.int64), sizes.cumsum(0)])
        assert torch.equal(own[0], table[numbers])
        assert torch.equal(own[1], torch.arange(len(numbers)).repeat_interleave(sizes[:, 0]))
        assert torch.equal(own[2], begins[:, 1])
        assert made.counts[place] == len(numbers)
        assert made.numbers[place, : len(numbers)].tolist() == numbers.tolist()
        assert made.ptr[:, place, : len(numbers) + 1].T.tolist() == begins.tolist()


@pytest.mark.parametrize("batches", [BATCHES, EVEN], ids=["sizes", "even"])
@pytest.mark.parametrize(("lines", "groups"), [(None, [0]), (1, [1]), (3, [0]), (2, [0, 1]), (2, [1, 0]), (2, [1, 1])])
def test_first_rows_of_graphs_are_added(device, lines, groups, batches):
    table = torch.randint(9, (SIZES[:, 1].sum(),) if lines is None else (lines, SIZES[:, 1].sum()))

    got, made = read(device, [TableRows(table.to(device), table.dim() - 1, 1, groups)], batches)

    for place, numbers in enumerate(batches):
        begins = torch.from_numpy(made.ptr[groups, place]).T[: len(numbers)]
        parts = zip(slice_each(table, -1, 1, numbers), begins if lines else begins[:, 0], strict=True)
        assert torch.equal(got[place][0], torch.cat([part + (first[:, None] if lines else first)
                                                     for part, first in parts], -1))  # fmt: skip


@pytest.mark.parametrize("batches", [BATCHES, EVEN], ids=["sizes", "even"])
@pytest.mark.parametrize(("lines", "width"), [(None, 1), (1, 1), (3, 1), (3, 3)])
def test_steps_of_graphs_are_added(device, lines, width, batches):
    table = torch.randint(9, (SIZES[:, 1].sum(),) if lines is None else (lines, SIZES[:, 1].sum()))
    steps = torch.randint(9, (4, width))

    layouts = [TableRows(table.to(device), table.dim() - 1, 1, steps.numpy()), RowBegins(0)]
    got, _ = read(device, [*layouts, layouts[0]], batches)

    for own, numbers in zip(got, batches, strict=True):
        sums = steps[numbers].cumsum(0) - steps[numbers]
        parts = zip(slice_each(table, -1, 1, numbers), sums, strict=True)
        expected = torch.cat([part + (one[:, None] if lines else one) for part, one in parts], -1)
        assert torch.equal(own[0], expected)
        assert torch.equal(own[2], expected)


def test_columns_of_several_dtypes_lie_apart(device):
    """Each has its own place, at a multiple of 16 bytes, and writes to one are not counted for another."""
    tables = [torch.rand(8, 3), torch.randint(255, (8, 5)).to(torch.uint8), torch.randint(9, (2, 8)), torch.rand(4, 1)]
    layouts = [TableRows(tables[0].to(device), 0, 0), TableRows(tables[1].to(device), 0, 0),
               TableRows(tables[2].to(device), 1, 0, [0]), TableRows(tables[3].to(device), 0, None),
               RowNumbers(0)]  # fmt: skip

    got, made = read(device, layouts)

    for place, numbers in enumerate(BATCHES):
        assert torch.equal(got[place][0], torch.cat(slice_each(tables[0], 0, 0, numbers)))
        assert torch.equal(got[place][1], torch.cat(slice_each(tables[1], 0, 0, numbers)))
        values = made.values[place]
        assert all(value.data_ptr() % 16 == 0 for value in values)
        before = [value.clone() for value in values]
        values[0].fill_(-1)
        assert all(torch.equal(own, other) for own, other in zip(values[1:], before[1:], strict=True))
        assert [value._version for value in values[1:]] == [0] * 4
    storages = [{value.untyped_storage().data_ptr() for value in values} for values in made.values]
    assert not set.intersection(*storages)
    # The row of each graph has memory of its own.
    assert all(values[3].untyped_storage().data_ptr() != values[0].untyped_storage().data_ptr()
               for values in made.values)  # fmt: skip
    # One for each dtype of the rows, and one for what has a row per graph.
    assert [len(own) for own in made.memory] == [4, 4, 4]


@pytest.mark.parametrize(("most", "count"), [(0, 1), (159, 1), (160, 2), (PLENTY, 3)])
def test_as_many_batches_as_the_memory_holds(device, most, count):
    """The first batch takes 8 rows of 16 bytes and 16 bytes for its labels, the second one only those."""
    table = torch.rand(8, 4)
    batches = [torch.tensor([2, 3, 0]), torch.tensor([1]), torch.tensor([2])]

    got, made = read(device, [TableRows(table.to(device), 0, 0), TableRows(torch.zeros(4, 1, device=device), 0, None)],
                     batches, most)  # fmt: skip

    assert len(got) == len(made.counts) == len(made.memory) == count
    assert torch.equal(got[0][0], torch.cat(slice_each(table, 0, 0, batches[0])))


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_rows_at_any_address_are_copied(device, offset):
    memory = torch.randint(255, (offset + 8 * 24,)).to(torch.uint8)

    got, _ = read(device, [TableRows(memory.to(device)[offset:].view(8, 24), 0, 0)])

    for own, numbers in zip(got, BATCHES, strict=True):
        assert torch.equal(own[0], torch.cat(slice_each(memory[offset:].view(8, 24), 0, 0, numbers)))


def test_tables_without_rows_or_columns(device):
    spans = torch.zeros(4, 2, dtype=torch.int64)
    tables = torch.zeros(0, 3), torch.zeros(4, 0), torch.zeros(2, 0, dtype=torch.int64)
    rows, wide, lines = (table.to(device) for table in tables)
    layouts = [TableRows(rows, 0, 0), TableRows(wide, 0, None), TableRows(lines, 1, 0, [0]), RowNumbers(0),
               RowBegins(0)]  # fmt: skip

    made = BatchesOfGraphs(spans, layouts, device).read(BATCHES, PLENTY)
    nothing = BatchesOfGraphs(spans, [], device).read(BATCHES, PLENTY)

    for values, numbers in zip(made.values, BATCHES, strict=True):
        count = len(numbers)
        assert [tuple(value.shape) for value in values] == [(0, 3), (count, 0), (2, 0), (0,), (count + 1,)]
        assert values[4].tolist() == [0] * (count + 1)
    assert nothing.values == [[], [], []]
    assert nothing.counts == [4, 1, 3]


def test_tables_that_change_are_found():
    table = torch.zeros(8, 3)
    reader = BatchesOfGraphs(SPANS, [TableRows(table, 0, 0), RowNumbers(0)], torch.device("cpu"))

    assert reader.is_current()
    table.requires_grad_()
    assert not reader.is_current()
    table.requires_grad_(False).resize_(9, 3)
    assert not reader.is_current()


def test_steps_are_summed_within_each_batch():
    steps = np.array([[[1], [2], [3]], [[4], [5], [6]]])

    assert graph_rows.sum_before(steps).tolist() == [[[0], [1], [3]], [[0], [4], [9]]]
