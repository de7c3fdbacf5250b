"""Reductions over edges: equal to the reference and to PyG, whatever the width, the dtype and the degrees."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch_geometric.utils import scatter

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.kernels.aggregate.sum import LONG_ROW, slice_length
from pyg_direct.ops.aggregate import operators
from pyg_direct.ops.aggregate.sum_rows import REDUCES, Transposed, aggregate
from tests.aggregates import NUM_ROWS, NUM_TARGETS, TOLERANCE, Graph, assert_near, hub_edges, make_rows
from tests.poison import poisoned_memory
from tests.reference import aggregate as reference

# One item, a few, a piece of 16 bytes, wider than a warp of items, wider than a warp of pieces.
WIDTHS = [1, 3, 8, 40] if SIMULATED else [1, 3, 4, 8, 47, 128, 520]


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("hub", [False, True], ids=["even", "hub"])
def test_matches_reference(device, reduce, width, hub):
    graph, x = Graph(device, hub_edges() if hub else 40, hub), make_rows(width, device=device)
    expected = reference.aggregate(x.cpu().double().numpy(), *graph.numpy(), reduce)

    with poisoned_memory():
        got = aggregate(x, graph.indptr, graph.row, reduce=reduce)

    assert (got.shape, got.dtype, got.device) == ((NUM_TARGETS, width), x.dtype, x.device)
    assert_near(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("hub", [False, True], ids=["even", "hub"])
@pytest.mark.parametrize("width", [3, 16])
def test_any_dtype_matches_reference(device, reduce, dtype, index, hub, width):
    graph, x = Graph(device, hub_edges() if hub else 40, hub), make_rows(width, dtype, device).requires_grad_()
    grad = make_rows(width, dtype, device, NUM_TARGETS)
    values = x.detach().cpu().double().numpy()

    got = aggregate(x, graph.indptr.to(index), graph.row.to(index), reduce=reduce)
    got.backward(grad)

    assert got.dtype == x.grad.dtype == dtype
    assert_near(got, reference.aggregate(values, *graph.numpy(), reduce), dtype)
    expected = reference.gradient(grad.cpu().double().numpy(), values, *graph.numpy(), reduce)
    # Rounded once at the end, but the rounded number grows with the hub.
    scale = max(1, np.abs(expected).max())
    assert_near(x.grad / scale, expected / scale, dtype)


@pytest.mark.parametrize("heads", [None, 1, 4])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_weights_of_heads_match_reference(device, heads, reduce):
    graph, x = Graph(device), make_rows(16, device=device).requires_grad_()
    weight = torch.rand(*(40,) if heads is None else (40, heads), device=device)
    grad = make_rows(16, device=device, num_rows=NUM_TARGETS)
    values = [t.detach().cpu().double().numpy() for t in (x, weight, grad)]

    got = aggregate(x, graph.indptr, graph.row, reduce=reduce, weight=weight)
    got.backward(grad)

    assert_near(got, reference.aggregate(values[0], *graph.numpy(), reduce, values[1]))
    assert_near(x.grad, reference.gradient(values[2], values[0], *graph.numpy(), reduce, values[1]))


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hub", [False, True], ids=["even", "hub"])
@pytest.mark.parametrize("run", [2, 4, 8])
def test_a_thread_may_see_to_several_targets(real_device, run, hub, dtype, heads, monkeypatch):
    # As for many targets.
    monkeypatch.setattr(operators, "length_of_run", lambda *_: run)
    graph, x = Graph(real_device, hub_edges() if hub else 40, hub), make_rows(32, dtype, real_device)
    weight = None if heads is None else torch.rand(graph.row.numel(), heads, device=real_device)

    for num_left_out, reduce in ((0, "sum"), (3, "mean")):
        part = slice(0, graph.row.numel() - num_left_out)
        shares = None if weight is None else weight[part]
        with poisoned_memory():
            got = aggregate(x, graph.indptr, graph.row[part], reduce=reduce, weight=shares,
                            max_degree=None if hub else 40)  # fmt: skip

        expected = reference.aggregate(x.cpu().double().numpy(), graph.indptr.clamp(max=part.stop).tolist(),
                                       graph.row[part].tolist(), reduce,
                                       None if shares is None else shares.cpu().double().numpy())  # fmt: skip
        assert_near(got, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hub", [False, True], ids=["even", "hub"])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_a_thread_may_see_to_the_extremes_of_several_targets(real_device, reduce, hub, dtype, monkeypatch):
    monkeypatch.setattr(operators, "length_of_run", lambda *_: 4)
    graph, x = Graph(real_device, hub_edges() if hub else 40, hub), make_rows(32, dtype, real_device)
    x[:, :8] = torch.inf if reduce == "min" else -torch.inf

    for num_left_out in (0, 3):
        row = graph.row[: graph.row.numel() - num_left_out]
        with poisoned_memory():
            got = aggregate(x, graph.indptr, row, reduce=reduce, max_degree=None if hub else 40)

        expected = reference.aggregate(x.cpu().double().numpy(), graph.indptr.tolist(), row.tolist(), reduce)
        assert got.double().tolist() == expected.tolist()


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("hub", [False, True], ids=["even", "hub"])
def test_equals_what_pyg_computes(device, reduce, hub):
    graph = Graph(device, hub_edges() if hub else 40, hub)
    ours, theirs = (make_rows(8, device=device).requires_grad_() for _ in range(2))
    theirs.data.copy_(ours.data)
    grad = torch.rand(NUM_TARGETS, 8, device=device)

    got = aggregate(ours, graph.indptr, graph.row, reduce=reduce)
    # Under grad mode PyG warns on a GPU that its maximum is slow.
    expected = scatter(theirs.cpu()[graph.row.cpu()], graph.target.cpu(), 0, NUM_TARGETS, reduce)
    got.backward(grad)
    expected.backward(grad.cpu())

    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5 * max(1, len(graph.row) // 100))


@pytest.mark.parametrize("reduce", REDUCES)
def test_rows_of_edges_are_reduced(device, reduce):
    graph, x = Graph(device), make_rows(8, device=device, num_rows=40).requires_grad_()
    grad = make_rows(8, device=device, num_rows=NUM_TARGETS)
    edges = graph.indptr.tolist(), list(range(40))

    got = aggregate(x, graph.indptr, reduce=reduce)
    got.backward(grad)

    values = x.detach().cpu().double().numpy()
    assert_near(got, reference.aggregate(values, *edges, reduce))
    assert_near(x.grad, reference.gradient(grad.cpu().double().numpy(), values, *edges, reduce))


@pytest.mark.parametrize("num_edges", [0, 17, 40])
@pytest.mark.parametrize("reduce", REDUCES)
def test_offsets_of_a_batch_serve_its_first_edges(device, num_edges, reduce):
    graph, x = Graph(device), make_rows(8, device=device).requires_grad_()
    row, values = graph.row[:num_edges], x.detach().cpu().double().numpy()
    expected = reference.aggregate(values, graph.indptr.tolist(), row.tolist(), reduce)[:7]

    got = aggregate(x, graph.indptr, row, reduce=reduce, num_targets=7)
    got.backward(torch.ones_like(got))

    edges = graph.indptr[:8].tolist(), row.tolist()
    assert_near(got, expected)
    assert_near(x.grad, reference.gradient(np.ones((7, 8)), values, *edges, reduce))


def test_edges_by_source_may_be_given(device):
    graph, x = Graph(device), make_rows(8, device=device).requires_grad_()
    by_source = Transposed.of(graph.row, graph.target, NUM_ROWS)

    aggregate(x, graph.indptr, graph.row, reduce="mean", transposed=by_source).sum().backward()

    expected = reference.gradient(np.ones((NUM_TARGETS, 8)), x.detach().cpu().double().numpy(), *graph.numpy(), "mean")
    assert_near(x.grad, expected)


def test_rows_of_several_dimensions_keep_them(device):
    graph, x = Graph(device), make_rows(12, device=device).view(NUM_ROWS, 3, 4)

    got = aggregate(x, graph.indptr, graph.row)

    assert_near(got.flatten(1), reference.aggregate(x.flatten(1).cpu().double().numpy(), *graph.numpy()))
    assert got.shape == (NUM_TARGETS, 3, 4)


def test_rows_off_any_line_are_read(device):
    graph, memory = Graph(device), torch.rand(1 + NUM_ROWS * 8, device=device)
    x = memory[1:].view(NUM_ROWS, 8)

    got = aggregate(x, graph.indptr, graph.row)

    assert_near(got, reference.aggregate(x.cpu().double().numpy(), *graph.numpy()))


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 8])
def test_what_is_not_a_number_is_told(device, reduce, dtype, width):
    x = torch.tensor([[1.0], [float("nan")], [2.0]], dtype=dtype, device=device).repeat(1, width)
    indptr, row = torch.tensor([0, 3, 4], device=device), torch.tensor([0, 1, 2, 2], device=device)

    got = aggregate(x, indptr, row, reduce=reduce)

    assert got.isnan().all(1).tolist() == [True, False]
    assert got[1].tolist() == width * [2]


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 8])
def test_a_largest_zero_has_no_sign(device, reduce, dtype, width):
    x = torch.tensor([[0.0], [-0.0]], dtype=dtype, device=device).repeat(1, width)
    row = torch.tensor([0, 1, 1, 0, 1, 1], device=device)

    got = aggregate(x, torch.tensor([0, 2, 4, 5, 6], device=device), row, reduce=reduce)

    assert not got.signbit().any()


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("width", [3, 8])
def test_gradients_of_what_is_not_a_number_are_none_as_in_pyg(device, reduce, width):
    indptr, row = torch.tensor([0, 3, 4, 4], device=device), torch.tensor([0, 1, 2, 2], device=device)
    ours = torch.tensor([[1.0], [float("nan")], [2.0]], device=device).repeat(1, width).requires_grad_()
    theirs = ours.detach().cpu().requires_grad_()

    aggregate(ours, indptr, row, reduce=reduce).sum().backward()
    scatter(theirs[row.cpu()], torch.tensor([0, 0, 0, 1]), 0, 3, reduce).sum().backward()

    assert ours.grad.isnan().all()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, equal_nan=True)


@given(degrees=st.lists(st.integers(0, 3 * LONG_ROW), max_size=12), reduce=st.sampled_from(REDUCES))
def test_any_degrees_match_reference(device, degrees, reduce):
    indptr = torch.tensor([0, *np.cumsum(degrees)], device=device, dtype=torch.int64)
    row = torch.arange(int(indptr[-1]), device=device) * 7 % NUM_ROWS
    x = make_rows(4, device=device)

    got = aggregate(x, indptr, row, reduce=reduce)

    assert_near(got, reference.aggregate(x.cpu().double().numpy(), indptr.tolist(), row.tolist(), reduce))


@pytest.mark.parametrize("heads", [(), (1,), (4,)], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("twice", [False, True])
def test_no_edges_with_weights_give_zeros(device, reduce, heads, twice):
    x = make_rows(8, device=device).requires_grad_()
    weight = torch.ones(0, *heads, device=device, requires_grad=True)
    indptr, row = torch.zeros(4, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int64, device=device)

    got = aggregate(x, indptr, row, reduce=reduce, weight=weight)
    grad_x, grad_weight = torch.autograd.grad(got.sum(), [x, weight], create_graph=twice)

    assert got.tolist() == [[0] * 8] * 3
    assert (bool(grad_x.any()), grad_weight.shape) == (False, weight.shape)


def test_no_rows_of_edges_give_zeros(device):
    got = aggregate(torch.empty(0, 2, 3, device=device), torch.zeros(4, dtype=torch.int64, device=device))

    assert got.shape == (3, 2, 3)
    assert not got.any()


@pytest.mark.parametrize("reduce", REDUCES)
def test_equal_calls_give_equal_bits(device, reduce):
    graph, x = Graph(device, hub_edges(), hub=True), torch.randn(NUM_ROWS, 8, device=device, requires_grad=True)
    results = []
    for _ in range(2):
        out = aggregate(x, graph.indptr, graph.row, reduce=reduce, deterministic=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])

    (first, second) = results
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_operators_obey_torch(device):
    graph, x = Graph(device), make_rows(8, device=device)
    grad = make_rows(8, device=device, num_rows=NUM_TARGETS)
    ops, checks = torch.ops.pyg_direct, ("test_schema", "test_faketensor")
    best = ops.extreme_rows(x, graph.indptr, graph.row, NUM_TARGETS, True, -1)

    for op, args in [
        (ops.sum_rows, (x, graph.indptr, graph.row, None, NUM_TARGETS, True, -1)),
        (ops.dot_rows, (grad, x, graph.indptr, graph.row, graph.target, 2, True)),
        (ops.extreme_rows, (x, graph.indptr, graph.row, NUM_TARGETS, True, -1)),
        (ops.spread_extremes, (grad, x, best, graph.indptr, graph.row, False, -1)),
    ]:
        found = torch.library.opcheck(op.default, args, test_utils=checks)

        assert set(found.values()) == {"SUCCESS"}


# torch's tracer instantiates autograd functions, of which torch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_compiled_functions_hold_the_operator(device):
    graph, x = Graph(device), make_rows(8, device=device).requires_grad_()

    def compute(t):
        return aggregate(t * 2, graph.indptr, graph.row, reduce="mean", target=graph.target) + 1

    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    expected, got = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compute, compiled))

    torch.testing.assert_close(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("width", [3, 8])
def test_graphs_hold_it_forward_and_backward(reduce, width):
    graph, x = Graph("cuda", hub_edges(), hub=True), torch.rand(NUM_ROWS, width, device="cuda", requires_grad=True)

    def step():
        out = aggregate(x, graph.indptr, graph.row, reduce=reduce, deterministic=True, target=graph.target)
        return out, torch.autograd.grad(out.square().sum(), x)[0]

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

    assert all(torch.equal(a, b) for a, b in zip(held, expected, strict=True))


def test_slices_of_a_hub_are_about_as_many_as_their_edges():
    for degree in (LONG_ROW + 1, 10**4, 10**6, 6 * 10**7):
        length = slice_length(degree)

        assert degree <= length * length
        assert length <= max(LONG_ROW, 2 * int(degree**0.5))


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"reduce": "mul"}, ArgumentError, "reduce must be one of sum, mean, max, min, got 'mul'"),
    ({"x": torch.ones(12, 4, dtype=torch.int64)}, ArgumentTypeError, "x must have rows of a floating dtype"),
    ({"indptr": torch.zeros(3)}, ArgumentTypeError, "indptr must be int64 or int32"),
    ({"num_targets": 3}, ArgumentError, "indptr must give every one of the 40 edges a target below num_targets=3"),
    ({"num_targets": 10}, ArgumentError, r"num_targets must lie in \[0, 9\], got 10"),
    ({"row": torch.tensor([0, 12])}, IdError, r"row must lie in \[0, 12\), got 12"),
    ({"weight": torch.ones(39)}, ArgumentError, r"weight must have shape \[40\] or \[40, H\], got \(39,\)"),
    ({"weight": torch.ones(40, 3)}, ArgumentError, "weight must have a divisor of 4 columns, got 3"),
    ({"weight": torch.ones(40), "reduce": "max"}, ArgumentError, "weight must be None for reduce='max'"),
])  # fmt: skip
def test_bad_arguments_are_refused(change, error, words):
    graph = Graph()
    arguments = {"x": make_rows(4), "indptr": graph.indptr, "row": graph.row, **change}

    with pytest.raises(error, match=words):
        aggregate(**arguments)
