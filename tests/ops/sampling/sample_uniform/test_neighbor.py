import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.compiler.jit import get_cpu_threads, set_cpu_threads
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.kernels.sampling.uniform import SHORT_ROW, TILE_EDGES
from pyg_direct.ops.sampling.sample_uniform import sample_neighbors
from tests.graphs import GRAPHS, odd_graphs
from tests.poison import poisoned_memory
from tests.reference import neighbor as reference

KEY = 2**64 - 3
FANOUTS = [0, 1, 3, 17, -1]


def place_rows(graph, device, dtype=torch.int32):
    """The graph's in-neighbors as tensors on a device."""
    indptr, indices, _ = graph.in_rows()
    return torch.tensor(indptr, device=device), torch.tensor(indices, dtype=dtype, device=device)


def check_against_reference(indptr, indices, seeds, *, fanout, replace, hop=0, key=KEY):
    """Check that every field equals the reference."""
    rows = reference.sample_neighbors(indptr.tolist(), seeds.tolist(), fanout, key, hop, replace)
    expected = [position for row in rows for position in row]

    with poisoned_memory():
        got = sample_neighbors(indptr, indices, seeds, fanout=fanout, key=key, hop=hop, replace=replace)

    assert got.counts.tolist() == [len(row) for row in rows]
    assert got.ids.tolist() == expected
    assert got.nodes.tolist() == indices[expected].tolist()
    assert (got.nodes.dtype, got.counts.dtype, got.ids.dtype) == (indices.dtype, torch.int64, torch.int64)


@pytest.mark.parametrize(("name", "fanout", "replace"), [
    ("random", 3, False),
    ("random", 3, True),
    ("random", -1, False),
    ("hub", 17, False),
    ("hub", 64, False),
    ("parallel", 8, False),
    ("isolated", 2, True),
    ("one loop", 5, True),
])  # fmt: skip
def test_matches_reference(device, name, fanout, replace):
    indptr, indices = place_rows(GRAPHS[name], device)
    seeds = torch.arange(GRAPHS[name].num_nodes, device=device).flip(0)

    check_against_reference(indptr, indices, seeds, fanout=fanout, replace=replace)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", FANOUTS)
@pytest.mark.parametrize("name", GRAPHS)
def test_matches_reference_on_every_odd_graph(device, name, fanout, replace, dtype):
    indptr, indices = place_rows(GRAPHS[name], device, dtype)
    seeds = torch.arange(GRAPHS[name].num_nodes, device=device).repeat(2)

    check_against_reference(indptr, indices, seeds, fanout=fanout, replace=replace, hop=4)


@given(graph=odd_graphs(), fanout=st.integers(-1, 6), replace=st.booleans(), key=st.integers(0, 2**64 - 1))
def test_matches_reference_on_any_graph(device, graph, fanout, replace, key):
    indptr, indices = place_rows(graph, device)
    seeds = torch.arange(graph.num_nodes, dtype=torch.int32, device=device)

    check_against_reference(indptr, indices, seeds, fanout=fanout, replace=replace, key=key)


@pytest.mark.parametrize("fanout", [SHORT_ROW + 1, TILE_EDGES, TILE_EDGES + 1, TILE_EDGES + 40])
@pytest.mark.parametrize("replace", [False, True])
def test_wide_rows_match_reference(device, fanout, replace):
    degrees = [TILE_EDGES + 50, 0, TILE_EDGES + 41, 3]
    indptr = torch.tensor([0, *torch.tensor(degrees).cumsum(0).tolist()], device=device)
    indices = torch.arange(sum(degrees), device=device).remainder(4).int()
    seeds = torch.tensor([3, 0, 1, 2], device=device)

    check_against_reference(indptr, indices, seeds, fanout=fanout, replace=replace)


@pytest.mark.slow
def test_large_hub_matches_reference(device):
    degree = 10**7
    indptr = torch.tensor([0, 0, degree], device=device)
    indices = torch.arange(degree, dtype=torch.int32, device=device).remainder(2)

    check_against_reference(indptr, indices, torch.tensor([1, 0, 1], device=device), fanout=2000, replace=False)


def test_picks_do_not_depend_on_company(device):
    indptr, indices = place_rows(GRAPHS["random"], device)

    together = sample_neighbors(indptr, indices, torch.tensor([7, 1, 0], device=device), fanout=4, key=KEY)
    alone = sample_neighbors(indptr, indices, torch.tensor([0], device=device), fanout=4, key=KEY)

    assert alone.counts.tolist() == together.counts[2:].tolist() == [4]
    assert alone.ids.tolist() == together.ids[-4:].tolist()


def test_picks_do_not_depend_on_threads():
    indptr, indices = place_rows(GRAPHS["random"], "cpu")
    seeds = torch.arange(70)
    before = set_cpu_threads(1)

    alone = sample_neighbors(indptr, indices, seeds, fanout=4, key=KEY)
    set_cpu_threads(before)
    together = sample_neighbors(indptr, indices, seeds, fanout=4, key=KEY)

    assert get_cpu_threads() == before
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(("seeds", "error", "words"), [
    (torch.tensor([0, 70]), IdError, r"seeds must lie in \[0, 70\), got 70"),
    (torch.tensor([0, -1]), IdError, r"seeds must lie in \[0, 70\), got -1"),
    (torch.tensor([0.0]), ArgumentTypeError, "seeds must have dtype int64 or int32, got torch.float32"),
    (torch.tensor([[0]]), ArgumentError, r"seeds must have one dimension, got shape \(1, 1\)"),
])  # fmt: skip
def test_bad_seeds_are_refused(device, seeds, error, words):
    indptr, indices = place_rows(GRAPHS["random"], device)

    with pytest.raises(error, match=words):
        sample_neighbors(indptr, indices, seeds.to(device), fanout=2, key=KEY)


@pytest.mark.parametrize(("fanout", "error", "words"), [
    (-2, ArgumentError, "fanout must hold values of at least -1, got -2"),
    (2.0, ArgumentTypeError, r"fanout must hold integers, got 2\.0"),
    (True, ArgumentTypeError, "fanout must hold integers, got True"),
])  # fmt: skip
def test_bad_fanouts_are_refused(fanout, error, words):
    indptr, indices = place_rows(GRAPHS["random"], "cpu")

    with pytest.raises(error, match=words):
        sample_neighbors(indptr, indices, torch.tensor([0]), fanout=fanout, key=KEY)


@pytest.mark.gpu
def test_seeds_must_be_where_the_topology_is():
    indptr, indices = place_rows(GRAPHS["random"], "cuda")

    with pytest.raises(ArgumentError, match=r"seeds must be on the device of indptr \(cuda:0\), got cpu"):
        sample_neighbors(indptr, indices, torch.tensor([0]), fanout=2, key=KEY)
