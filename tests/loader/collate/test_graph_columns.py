"""Values of graphs are joined as torch joins them, or found where they lie together."""

import pytest
import torch
from torch_geometric.data import Data, InMemoryDataset

from pyg_direct.loader.collate.graph_columns import count_rows, join_rows, stack_values


class InMemory(InMemoryDataset):
    def __init__(self, graphs):
        super().__init__(None)
        self.data, self.slices = self.collate(graphs)


def join(values, dim):
    return join_rows(values, dim, count_rows(values, dim))


def read_back(table, begins, values, dim):
    """The values as batches would read them."""
    sizes = count_rows(values, dim)
    begins = sizes.cumsum(0) - sizes if begins is None else begins
    return [table.narrow(dim, begin, size) for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]


@pytest.mark.parametrize("count", [1, 3, 64, 200])
@pytest.mark.parametrize(("shape", "dim"), [((0, 2), 0), ((2, 0), 1), ((0,), 0), ((2, 0, 3), 1)])
def test_separate_values_are_joined_as_by_cat(count, shape, dim):
    values = [torch.rand([number % 4 if at == dim else size for at, size in enumerate(shape)])
              for number in range(count)]  # fmt: skip

    table, begins = join(values, dim)

    assert begins is None
    assert torch.equal(table, torch.cat(values, dim))
    assert table.is_contiguous()


@pytest.mark.parametrize("count", [1, 64, 150])
def test_values_are_stacked_as_by_stack(count):
    values = [torch.rand(2, 3) for _ in range(count)]

    assert torch.equal(stack_values(values), torch.stack(values))
    assert stack_values([torch.tensor(2), torch.tensor(5)]).tolist() == [2, 5]


@pytest.mark.parametrize("part", [slice(None), slice(3, None), slice(0, 40, 1), slice(None, None, -1)])
def test_graphs_of_a_data_set_are_read_where_they_lie(part):
    dataset = InMemory([Data(x=torch.rand(i % 4, 3), edge_index=torch.randint(9, (2, i % 5))) for i in range(50)])
    graphs = [dataset[number] for number in range(50)][part]

    for name, dim in (("x", 0), ("edge_index", 1)):
        values = [graph[name] for graph in graphs]
        table, begins = join(values, dim)

        assert table is values[0]._base
        assert table.data_ptr() == dataset._data[name].data_ptr()
        assert all(map(torch.equal, read_back(table, begins, values, dim), values))


def make_odd_views():
    rows = torch.arange(600.0).view(100, 6)
    other = torch.arange(600.0).view(100, 6)
    return {
        "few rows of many": [rows[i : i + 1] for i in range(9)],
        "some columns": [rows[i : i + 5, :3] for i in range(0, 95, 5)],
        "every second row": [rows[::2][i : i + 5] for i in range(0, 45, 5)],
        "turned": [rows.t()[:, i : i + 5].t() for i in range(0, 95, 5)],
        "of two tensors": [(rows, other)[i % 2][i : i + 5] for i in range(0, 95, 5)],
        "of another shape": [rows.view(-1)[i : i + 10] for i in range(0, 590, 10)],
        "of another dtype": [rows[i : i + 5].view(torch.int32) for i in range(0, 95, 5)],
        "one apart": [*(rows[i : i + 5] for i in range(0, 95, 5)), rows[:5].clone()],
        "overlapping": [rows[i : i + 8] for i in range(0, 90, 5)],
    }


@pytest.mark.parametrize("name", make_odd_views())
def test_other_views_are_joined_or_read_right(name):
    values = make_odd_views()[name]

    table, begins = join(values, 0)

    assert all(map(torch.equal, read_back(table, begins, values, 0), values))
    if name in ("few rows of many", "some columns", "every second row", "of two tensors", "one apart"):
        assert begins is None
        assert torch.equal(table, torch.cat(values))


def test_views_that_need_a_gradient_are_no_table():
    rows = torch.rand(10, 2, requires_grad=True)
    values = [rows[i : i + 2].detach() for i in range(0, 10, 2)]

    table, _ = join(values, 0)

    assert not table.requires_grad
    assert torch.equal(table, rows.detach())
