"""Latest neighbors equal the reference on every device, and ids outside the graph are named."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.ops.keep_last_events import LastNeighbors, insert_events, read_rows
from tests.reference import last_neighbors as reference


def ids(values, device, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device)


@given(data=st.data(), num_nodes=st.sampled_from([1, 2, 7, 70]), size=st.integers(1, 4),
       dtype=st.sampled_from([torch.int32, torch.int64]))  # fmt: skip
def test_matches_reference(device, data, num_nodes, size, dtype):
    node = st.integers(0, num_nodes - 1)
    rows, expected = LastNeighbors.open(num_nodes, size, device), reference.LastNeighbors(num_nodes, size)

    for _ in range(3):
        src, dst = (
            data.draw(st.lists(node, min_size=count, max_size=count)) for count in [data.draw(st.integers(0, 9))] * 2
        )
        n_id = data.draw(st.lists(node, max_size=5))
        insert_events(rows, ids(src, device, dtype), ids(dst, device, dtype), expected.count)
        expected.insert(src, dst)

        got = read_rows(rows, ids(n_id, device, dtype))

        if n_id:
            assert [part.tolist() for part in got] == list(expected.read(n_id))
        assert rows.e_id.tolist() == [[event for event, _ in row] + [-1] * (size - len(row)) for row in expected.rows]


def test_a_hub_keeps_its_last_events(device):
    rows, expected = LastNeighbors.open(300, 5, device), reference.LastNeighbors(300, 5)
    dst = torch.arange(1, 300).tolist()

    insert_events(rows, ids([0] * 299, device), ids(dst, device), 0)
    expected.insert([0] * 299, dst)

    assert [part.tolist() for part in read_rows(rows, ids([0, 7], device))] == list(expected.read([0, 7]))


def test_without_nodes_there_are_no_edges(device):
    rows = LastNeighbors.open(3, 2, device)

    nodes, edges, e_id = read_rows(rows, ids([], device))

    assert (nodes.shape, edges.shape, e_id.shape) == ((0,), (2, 0), (0,))
    assert {nodes.dtype, edges.dtype, e_id.dtype} == {torch.int64}


@pytest.mark.parametrize("value", [-1, 9, 2**62])
@pytest.mark.parametrize("end", [0, 1])
def test_ids_of_events_outside_the_graph_are_named(device, value, end):
    rows, ends = LastNeighbors.open(9, 2, device), [[3, 4], [5, 6]]
    ends[end][1] = value

    def insert_and_read():
        insert_events(rows, *(ids(part, device) for part in ends), 0)
        # A GPU reports it here.
        read_rows(rows, ids([3, 4, 5, 6], device))

    with pytest.raises(IdError, match=rf"must lie in \[0, 9\), got {value}"):
        insert_and_read()

    assert read_rows(rows, ids([8], device))[0].tolist() == [8]


@pytest.mark.parametrize("value", [-1, 9, -(2**62)])
def test_nodes_outside_the_graph_are_named(device, value):
    rows = LastNeighbors.open(9, 2, device)

    with pytest.raises(IdError, match=rf"n_id must lie in \[0, 9\), got {value}"):
        read_rows(rows, ids([3, value], device))

    assert read_rows(rows, ids([3], device))[0].tolist() == [3]


@pytest.mark.parametrize(("src", "dst", "error", "words"), [
    (torch.zeros(2).long(), torch.zeros(3).long(), ArgumentError, "dst must have an end for each of the 2 events"),
    (torch.zeros(2), torch.zeros(2).long(), ArgumentTypeError, "src must have dtype int64 or int32"),
    (torch.zeros(2).long(), [0, 0], ArgumentTypeError, "dst must be a tensor, got list"),
    (torch.zeros(2, 1).long(), torch.zeros(2).long(), ArgumentError, "src must have one dimension"),
])  # fmt: skip
def test_wrong_events_are_named(src, dst, error, words):
    with pytest.raises(error, match=words):
        insert_events(LastNeighbors.open(9, 2, torch.device("cpu")), src, dst, 0)
