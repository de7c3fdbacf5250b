"""Softmax over the edges of each target: equal to the reference and to PyG, whatever gives the scores."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch_geometric.utils import softmax as pyg_softmax

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.ops.aggregate.compute_softmax import softmax
from pyg_direct.ops.local_ids.build_csr import compress_ids
from tests.poison import poisoned_memory
from tests.reference import softmax as reference

NUM_NODES, NUM_TARGETS, HEADS = 12, 9, 2
GIVEN = {"source and target": (True, True, False), "source": (True, False, False), "edge": (False, False, True),
         "all": (True, True, True)}  # fmt: skip


class Graph:
    """Edges sorted by target, in which each target's last edge is a loop if asked for; some targets have none."""

    def __init__(self, device="cpu", num_edges=40, hub=False, loops=False, seed=0):
        random = np.random.default_rng(seed)
        target = random.integers(0, NUM_TARGETS - 2, num_edges)
        if hub:
            target[: num_edges // 2] = 4
        target, row = np.sort(target), random.integers(0, NUM_NODES, num_edges)
        if loops:
            row[np.append(np.diff(target) > 0, True)] = target[np.append(np.diff(target) > 0, True)]
            row[0] = target[0]
        self.target = torch.from_numpy(target).to(device)
        self.indptr, self.row = compress_ids(self.target, NUM_TARGETS), torch.from_numpy(row).to(device)

    def scores(self, given, dtype=torch.float32, heads=HEADS):
        lengths = NUM_NODES, NUM_TARGETS, len(self.row)
        return [torch.randn(n, heads, dtype=dtype).to(self.row.device).requires_grad_() if g else None
                for n, g in zip(lengths, given, strict=True)]  # fmt: skip


def expect(graph, scores, **options):
    values = [None if part is None else part.detach().cpu().double().numpy() for part in scores]
    return torch.from_numpy(reference.softmax(*values, graph.indptr.tolist(), graph.row.tolist(), **options))


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("hub", [False, True], ids=["even", "hub"])
def test_matches_reference(device, given, loops, hub):
    graph = Graph(device, 400 if hub else 40, hub, loops)
    scores = graph.scores(GIVEN[given])
    expected = expect(graph, scores, slope=0.2, loops=loops)

    with poisoned_memory():
        got = softmax(*scores, graph.indptr, graph.row, negative_slope=0.2, loops=loops)

    torch.testing.assert_close(got.detach().cpu().double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("max_degree", [None, 40])
def test_equals_what_pyg_computes(device, given, deterministic, max_degree):
    graph = Graph(device)
    scores = graph.scores(GIVEN[given])
    source, target, edge = scores
    grad = torch.rand(len(graph.row), HEADS, device=device)
    lifted = [None if source is None else source[graph.row], None if target is None else target[graph.target], edge]
    total = sum(part for part in lifted if part is not None)
    inputs = [part for part in scores if part is not None]
    expected = pyg_softmax(torch.nn.functional.leaky_relu(total, 0.2), graph.target, num_nodes=NUM_TARGETS)
    expected_grads = torch.autograd.grad(expected, inputs, grad)

    got = softmax(*scores, graph.indptr, graph.row, negative_slope=0.2, max_degree=max_degree,
                  deterministic=deterministic)  # fmt: skip

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(torch.autograd.grad(got, inputs, grad), expected_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_offsets_of_a_batch_serve_its_first_edges(device, index):
    graph = Graph(device)
    scores = graph.scores((True, True, False), torch.float64)
    scores[1] = scores[1][:7]
    graph.row = graph.row[:17]
    expected = expect(graph, [scores[0], torch.cat([scores[1], scores[1]]), None])

    got = softmax(*scores, graph.indptr.to(index), graph.row.to(index), num_targets=7)

    torch.testing.assert_close(got.detach().cpu(), expected)


@given(degrees=st.lists(st.integers(0, 70), max_size=9), heads=st.integers(1, 3))
def test_any_degrees_match_reference(device, degrees, heads):
    graph = Graph(device)
    graph.indptr = torch.tensor([0, *np.cumsum(degrees)], device=device, dtype=torch.int64)
    graph.row = torch.arange(int(graph.indptr[-1]), device=device) * 7 % NUM_NODES
    scores = [torch.randn(NUM_NODES, heads, device=device), None, None]

    got = softmax(*scores, graph.indptr, graph.row)

    torch.testing.assert_close(got.cpu().double(), expect(graph, scores), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("loops", [False, True])
def test_gradcheck(given, loops):
    graph = Graph(num_edges=10, loops=loops)
    scores = graph.scores(GIVEN[given], torch.float64, heads=1)
    inputs = tuple(part for part in scores if part is not None)

    def compute(*values):
        parts = iter(values)
        given_again = [None if part is None else next(parts) for part in scores]
        return softmax(*given_again, graph.indptr, graph.row, negative_slope=0.2, loops=loops)

    assert torch.autograd.gradcheck(compute, inputs)
    assert torch.autograd.gradgradcheck(compute, inputs)


def test_large_scores_do_not_overflow(device):
    graph = Graph(device)
    scores = [torch.full((NUM_NODES, 1), 300.0, device=device), None, None]

    got = softmax(*scores, graph.indptr, graph.row)

    sums = torch.zeros(NUM_TARGETS, 1, device=device).index_add(0, graph.target, got)
    torch.testing.assert_close(sums, (graph.indptr.diff() > 0).float().view(-1, 1))


def test_equal_calls_give_equal_bits(device):
    graph = Graph(device, 400, hub=True)
    scores = graph.scores((True, True, False))
    results = []
    for _ in range(2):
        out = softmax(*scores, graph.indptr, graph.row, deterministic=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), scores[:2])])

    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("spread", [False, True])
def test_operators_obey_torch(device, spread):
    graph, checks = Graph(device), ("test_schema", "test_faketensor")
    source, target, edge = (part.detach() for part in graph.scores((True, True, True)))
    ops = torch.ops.pyg_direct
    alpha = ops.softmax_edges(source, target, edge, graph.indptr, graph.row, NUM_TARGETS, False, 0.2, -1)

    for op, args in [
        (ops.softmax_edges, (source, target, edge, graph.indptr, graph.row, NUM_TARGETS, True, 0.2, -1)),
        (ops.pull_softmax, (alpha, alpha, source, None, None, graph.indptr, graph.row, NUM_TARGETS, 0.2, -1,
                            spread and source.is_cuda)),
    ]:  # fmt: skip
        found = torch.library.opcheck(op.default, args, test_utils=checks)

        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"source": None}, ArgumentError, "source, target or edge must be given"),
    ({"source": torch.ones(12, 2, dtype=torch.int64)}, ArgumentTypeError, "source must be float32 or float64"),
    ({"target": torch.ones(9, 2).double()}, ArgumentTypeError, "target must be float32 or float64, as other scores"),
    ({"target": torch.ones(8, 2)}, ArgumentError, r"target must have shape \[9, 2\], got \(8, 2\)"),
    ({"edge": torch.ones(40, 3)}, ArgumentError, r"edge must have shape \[40, 2\], got \(40, 3\)"),
    ({"num_targets": 10}, ArgumentError, "indptr must hold the 11 offsets of num_targets, got 10"),
    ({"num_targets": 3}, ArgumentError, "indptr must give every one of the 40 edges a target below num_targets=3"),
    ({"row": torch.tensor([0, 12])}, IdError, r"row must lie in \[0, 12\), got 12"),
])  # fmt: skip
def test_bad_arguments_are_refused(change, error, words):
    graph = Graph()
    arguments = {"source": torch.ones(12, 2), "target": None, "edge": None, "indptr": graph.indptr, "row": graph.row,
                 **change}  # fmt: skip

    with pytest.raises(error, match=words):
        softmax(**arguments)
