"""Softmax and weighted sum at once: equal to the reference, to PyG and to the two operators, in one launch on a GPU."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch_geometric.utils import softmax as pyg_softmax

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.ops.aggregate import compute_softmax as module
from pyg_direct.ops.aggregate.compute_softmax import attend, softmax
from pyg_direct.ops.aggregate.sum_rows import aggregate
from pyg_direct.ops.run_kernel import runs_on_gpu
from tests.aggregates import TOLERANCE, assert_near, hub_edges
from tests.launches import TWO_LAUNCHES, counted_launches, of_attention
from tests.ops.aggregate.compute_softmax.test_softmax import NUM_NODES, NUM_TARGETS, Graph
from tests.poison import poisoned_memory
from tests.reference.attend import attend as reference

GIVEN = {"source and target": (True, True, False), "edge": (False, False, True)}
# Heads and their columns: one item, a few, one piece of 16 bytes for each head, wider than a warp of items or pieces.
SHAPES = (
    [(1, 1), (2, 3), (2, 4)] if SIMULATED else [(1, 1), (1, 3), (2, 3), (2, 4), (1, 47), (3, 16), (1, 160), (8, 32)]
)


def make(graph, given, heads, channels, dtype=torch.float32):
    x = torch.randn(NUM_NODES, heads, channels).to(graph.row.device, dtype)
    # Some scores are far apart, so that sums shrink on the way.
    scores = [None if part is None else part.detach() * 3 for part in graph.scores(GIVEN[given], heads=heads)]
    return x, scores


def expect(graph, x, scores, **options):
    lists = [None if part is None else part.detach().cpu().double().numpy() for part in scores]
    values = x.detach().cpu().double().flatten(1).numpy()
    return [torch.from_numpy(part) for part in reference(values, *lists, graph.indptr.tolist(), graph.row.tolist(),
                                                         **options)]  # fmt: skip


def kind_of(x):
    return "gpu" if runs_on_gpu(x) else "cpu"


def is_one_launch(x):
    """Of heads in pieces of 16 bytes, which the simulator does not know."""
    return runs_on_gpu(x) and not SIMULATED and x.shape[2] * x.element_size() % 16 == 0


def degree_of(graph):
    return int(graph.indptr.diff().max())


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("loops", [False, True])
def test_matches_reference_in_one_launch(device, given, shape, loops):
    graph = Graph(device, loops=loops)
    x, scores = make(graph, given, *shape)
    expected, weights = expect(graph, x, scores, slope=0.2, loops=loops)
    options = NUM_TARGETS, loops, 0.2, degree_of(graph)

    operator = torch.ops.pyg_direct.attend_rows

    with counted_launches() as names, poisoned_memory():
        got = attend(x, *scores, graph.indptr, graph.row, negative_slope=0.2, loops=loops, max_degree=options[3],
                     deterministic=False)  # fmt: skip
        out, alpha = operator(x.flatten(1), *scores, graph.indptr, graph.row, *options, True)

    assert_near(got.flatten(1), expected)
    assert_near(alpha, weights)
    assert (got.shape, torch.equal(out, got.flatten(1))) == ((NUM_TARGETS, *shape), True)
    assert of_attention(names) == (["attend_rows_gpu"] if is_one_launch(x) else TWO_LAUNCHES[kind_of(x)]) * 2


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.full
def test_any_dtype_matches_reference(device, given, dtype, index, channels):
    graph = Graph(device, loops=True)
    x, scores = make(graph, given, 2, channels, dtype)
    if dtype == torch.float64:
        scores = [None if part is None else part.double() for part in scores]
    expected, _ = expect(graph, x, scores, loops=True)

    got = attend(x, *scores, graph.indptr.to(index), graph.row.to(index), loops=True, max_degree=degree_of(graph))

    assert got.dtype == dtype
    assert_near(got.flatten(1), expected, dtype)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [3, 16])
def test_sums_of_16_bit_rows_may_be_wider(device, given, dtype, channels):
    graph = Graph(device)
    x, scores = make(graph, given, 2, channels, dtype)
    expected, _ = expect(graph, x, scores)
    for leaf in (x, *scores):
        if leaf is not None:
            leaf.requires_grad_()

    got = attend(x, *scores, graph.indptr, graph.row, max_degree=degree_of(graph), widens=True)
    wide = attend(x.float(), *scores, graph.indptr, graph.row, max_degree=degree_of(graph))

    assert got.dtype == torch.float32
    assert_near(got.flatten(1), expected, torch.float32)
    leaves = [leaf for leaf in (x, *scores) if leaf is not None]
    weight = torch.randn_like(got)
    for one, other in zip(torch.autograd.grad((got * weight).sum(), leaves),
                          torch.autograd.grad((wide * weight).sum(), leaves), strict=True):  # fmt: skip
        assert_near(one.float(), other.float(), dtype)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("run", [1, 2, 4, 8])
def test_a_thread_may_see_to_several_targets(real_device, run, heads, dtype, given, monkeypatch):
    # As for many targets.
    monkeypatch.setattr(module, "length_of_run", lambda *_: run)
    for loops, num_left_out in ((False, 0), (False, 3), (True, 0)):
        graph = Graph(real_device, 100, loops=loops, seed=run)
        graph.row = graph.row[: 100 - num_left_out]
        x, scores = make(graph, given, heads, 24, dtype)
        expected, weights = expect(graph, x, scores, slope=0.2, loops=loops)
        options = NUM_TARGETS, loops, 0.2, degree_of(graph), True

        with poisoned_memory():
            got, alpha = torch.ops.pyg_direct.attend_rows(x.flatten(1), *scores, graph.indptr, graph.row, *options)

        assert_near(got, expected, dtype)
        assert_near(alpha, weights)


@given(degrees=st.lists(st.integers(0, 16), max_size=9), heads=st.integers(1, 3), channels=st.sampled_from([1, 4, 5]))
def test_any_degrees_match_reference(device, degrees, heads, channels):
    graph = Graph(device)
    graph.indptr = torch.tensor([0, *torch.tensor(degrees, dtype=torch.int64).cumsum(0)], device=device)
    graph.row = torch.arange(int(graph.indptr[-1]), device=device) * 7 % NUM_NODES
    x, source, target = (torch.randn(count, heads, width, device=device)
                         for count, width in ((NUM_NODES, channels), (NUM_NODES, 1), (len(degrees), 1)))  # fmt: skip
    scores = [source.squeeze(2), target.squeeze(2), None]

    got = attend(x, *scores, graph.indptr, graph.row, max_degree=16)

    assert_near(got.flatten(1), expect(graph, x, scores)[0])


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("shape", [(2, 4), (3, 1)], ids=str)
@pytest.mark.parametrize("slope", [0.2, 0.0])
def test_gradients_equal_pyg(device, given, shape, slope):
    graph = Graph(device)
    x, scores = make(graph, given, *shape)
    inputs = [part.requires_grad_() for part in (x, *scores) if part is not None]
    grad = torch.randn(NUM_TARGETS, *shape, device=device)
    source, target, edge = scores
    total = edge if source is None else source[graph.row] + target[graph.target]
    alpha = pyg_softmax(torch.nn.functional.leaky_relu(total, slope), graph.target, num_nodes=NUM_TARGETS)
    expected = x.new_zeros(NUM_TARGETS, *shape).index_add(0, graph.target, x[graph.row] * alpha.unsqueeze(-1))
    wanted = torch.autograd.grad(expected, inputs, grad)

    with counted_launches() as names:
        got = attend(x, *scores, graph.indptr, graph.row, negative_slope=slope, max_degree=degree_of(graph))
        launched = len(names)
        made = torch.autograd.grad(got, inputs, grad)

    assert_near(got, expected.detach().cpu())
    for one, other in zip(made, wanted, strict=True):
        assert_near(one, other.cpu())
    assert launched == (1 if is_one_launch(x) else len(TWO_LAUNCHES[kind_of(x)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", GIVEN)
def test_gradients_equal_those_of_two_launches(device, dtype, given):
    graph, results = Graph(device, loops=True), []
    x, scores = make(graph, given, 2, 8, dtype)
    inputs = [part.requires_grad_() for part in (x, *scores) if part is not None]
    grad = torch.randn(NUM_TARGETS, 2, 8, device=device).to(dtype)

    # Only gradients need the targets of edges, which they find themselves.
    for target_of, deterministic in ((graph.target, False), (None, False), (None, True)):
        got = attend(x, *scores, graph.indptr, graph.row, target_of=target_of, negative_slope=0.2, loops=True,
                     max_degree=degree_of(graph), deterministic=deterministic)  # fmt: skip
        results.append([got, *torch.autograd.grad(got, inputs, grad)])

    for of_one in results[:2]:
        for one, other in zip(of_one, results[2], strict=True):
            assert_near(one.detach(), other.detach().cpu(), dtype)


@pytest.mark.parametrize("given", GIVEN)
def test_gradients_of_some_inputs_are_those_of_all(device, given):
    graph = Graph(device)
    x, scores = make(graph, given, 2, 4)
    inputs = [part for part in (x, *scores) if part is not None]
    options = {"negative_slope": 0.2, "max_degree": degree_of(graph)}

    def differentiate(wanted):
        for part in inputs:
            part.requires_grad_(any(part is one for one in wanted))
        out = attend(x, *scores, graph.indptr, graph.row, **options)
        return torch.autograd.grad(out.square().sum(), wanted)

    together = differentiate(inputs)

    for part, expected in zip(inputs, together, strict=True):
        torch.testing.assert_close(differentiate([part])[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", GIVEN)
def test_gradients_of_gradients_are_those_of_two_launches(device, given):
    graph, results = Graph(device), []
    x, scores = make(graph, given, 2, 4)
    leaves = [x.requires_grad_(), torch.randn(4, device=device, requires_grad=True)]
    for deterministic in (False, True):
        # Scores that depend on the rows, as in a layer.
        of_rows = (x * leaves[1]).sum(-1)
        given_again = [of_rows, of_rows[:NUM_TARGETS], None] if scores[2] is None else [None, None, of_rows[graph.row]]
        out = attend(x, *given_again, graph.indptr, graph.row, negative_slope=0.2, max_degree=degree_of(graph),
                     deterministic=deterministic)  # fmt: skip
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), leaves)
        results.append([*first, *second])

    for one, other in zip(*results, strict=True):
        scale = max(1.0, float(other.detach().abs().max()))
        assert_near(one.detach() / scale, other.detach().cpu() / scale)


def test_gradcheck():
    graph = Graph(num_edges=10)
    x = torch.randn(NUM_NODES, 1, 2, dtype=torch.float64, requires_grad=True)
    scores = graph.scores((True, True, False), torch.float64, heads=1)

    def compute(rows, source, target):
        return attend(rows, source, target, None, graph.indptr, graph.row, negative_slope=0.2)

    assert torch.autograd.gradcheck(compute, (x, *scores[:2]))
    assert torch.autograd.gradgradcheck(compute, (x, *scores[:2]))


def test_without_gradients_no_weights_are_kept(device):
    graph = Graph(device)
    x, scores = make(graph, "edge", 2, 4)
    arguments = x.flatten(1), *scores, graph.indptr, graph.row, NUM_TARGETS, False, 1.0, degree_of(graph)

    (kept, alpha), (out, none) = (torch.ops.pyg_direct.attend_rows(*arguments, keeps) for keeps in (True, False))

    assert torch.equal(out, kept)
    assert (alpha.shape, none.shape) == ((len(graph.row), 2), (0, 2))


def begin_in_between(x):
    """The same rows, one item further in memory."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)


OTHERS = {
    "a hub": lambda graph, x: {"max_degree": None},
    "a fixed order": lambda graph, x: {"deterministic": True},
    "heads of 12 bytes": lambda graph, x: {"x": x[..., :3].contiguous()},
    "rows that begin in between": lambda graph, x: {"x": begin_in_between(x)},
    "scores of both ends and of edges": lambda graph, x: {"edge": torch.randn(len(graph.row), 2, device=x.device)},
    "scores of sources": lambda graph, x: {"target": None},
}


@pytest.mark.parametrize("case", OTHERS)
def test_anything_else_takes_two_launches(device, case):
    graph = Graph(device, hub_edges() if case == "a hub" else 40, hub=case == "a hub")
    x, (source, target, _) = make(graph, "source and target", 2, 4)
    options = {"x": x, "source": source, "target": target, "edge": None, "max_degree": degree_of(graph),
               **OTHERS[case](graph, x)}  # fmt: skip
    scores = [options[name] for name in ("source", "target", "edge")]

    with counted_launches() as names:
        got = attend(indptr=graph.indptr, row=graph.row, **options)

    assert_near(got.flatten(1), expect(graph, options["x"], scores)[0])
    assert of_attention(names) == TWO_LAUNCHES[kind_of(x)]


# NumPy, in which the simulator computes, warns of a NaN.
@pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("channels", [3, 4])
def test_scores_without_a_largest_end_as_those_of_the_softmax(device, channels):
    infinity, indptr = float("inf"), torch.tensor([0, 1, 6, 11, 16, 17], device=device)
    edge = torch.zeros(17, 1)
    # One of many, all of them, one that is larger than all, and none that is a number.
    edge[1], edge[6:11], edge[14], edge[16] = -infinity, -infinity, infinity, float("nan")
    row, x = torch.arange(17, device=device) % 5, torch.rand(5, channels, device=device)
    edge = edge.to(device)
    alpha = softmax(None, None, edge, indptr, row)

    got, weights = torch.ops.pyg_direct.attend_rows(x, None, None, edge, indptr, row, 5, False, 1.0, 5, True)

    torch.testing.assert_close(weights, alpha, equal_nan=True)
    torch.testing.assert_close(got, aggregate(x, indptr, row, weight=alpha), equal_nan=True)
    assert got.isnan().any(1).tolist() == [False, False, True, True, True]


def test_large_scores_do_not_overflow(device):
    graph = Graph(device)
    x, source = torch.ones(NUM_NODES, 4, device=device), torch.full((NUM_NODES, 1), 300.0, device=device)
    target = torch.zeros(NUM_TARGETS, 1, device=device)

    got = attend(x, source, target, None, graph.indptr, graph.row, max_degree=degree_of(graph))

    torch.testing.assert_close(got, (graph.indptr.diff() > 0).float().view(-1, 1).expand(-1, 4))


@pytest.mark.parametrize("count", [0, 3])
def test_no_edges_give_zeros(device, count):
    indptr, row = (torch.zeros(n, dtype=torch.int64, device=device) for n in (count + 1, 0))
    x = torch.rand(5, 4, device=device, requires_grad=True)

    got = attend(x, torch.rand(5, 2, device=device), torch.rand(count, 2, device=device), None, indptr, row)
    got.sum().backward()

    assert got.tolist() == [[0] * 4] * count
    assert not x.grad.any()


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("keeps", [False, True])
def test_operator_obeys_torch(device, given, keeps):
    graph = Graph(device)
    x, scores = make(graph, given, 2, 4)
    arguments = x.flatten(1), *scores, graph.indptr, graph.row, NUM_TARGETS, False, 0.2, degree_of(graph), keeps

    found = torch.library.opcheck(torch.ops.pyg_direct.attend_rows.default, arguments,
                                  test_utils=("test_schema", "test_faketensor"))  # fmt: skip

    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("given", GIVEN)
def test_graphs_hold_it_forward_and_backward(given, channels):
    graph = Graph("cuda")
    x, scores = make(graph, given, 2, channels)
    inputs = [part.requires_grad_() for part in (x, *scores) if part is not None]
    degree = degree_of(graph)

    def step():
        out = attend(x, *scores, graph.indptr, graph.row, target_of=graph.target, max_degree=degree)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    captured = torch.cuda.CUDAGraph()
    # All on one stream, as autograd wants it of one leaf.
    with torch.cuda.stream(side):
        step()
        with torch.cuda.graph(captured, stream=side):
            held = step()
        x.data.uniform_()
        captured.replay()
        expected = step()
    side.synchronize()

    assert torch.equal(held[0], expected[0])
    for one, other in zip(held[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"source": None, "target": None}, ArgumentError, "source, target or edge must be given"),
    ({"source": torch.ones(12, 2).half()}, ArgumentTypeError, "source must be float32 or float64"),
    ({"x": torch.ones(12, 4, dtype=torch.int64)}, ArgumentTypeError, "x must have rows of a floating dtype"),
    ({"x": torch.ones(12, 5)}, ArgumentError, "scores must have a divisor of 5 columns, got 2"),
    ({"x": torch.ones(11, 4), "row": torch.tensor([11])}, IdError, r"row must lie in \[0, 11\), got 11"),
    ({"num_targets": 3, "target": torch.ones(3, 2)}, ArgumentError, "indptr must give every one of the 40 edges"),
])  # fmt: skip
def test_bad_arguments_are_refused(change, error, words):
    graph = Graph()
    arguments = {"x": torch.ones(12, 4), "source": torch.ones(12, 2), "target": torch.ones(9, 2), "edge": None,
                 "indptr": graph.indptr, "row": graph.row, **change}  # fmt: skip

    with pytest.raises(error, match=words):
        attend(**arguments)
