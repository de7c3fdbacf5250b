"""A layer over relations in one step of autograd: torch's results and gradients, and no work for unused results."""

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import HeteroConv, SAGEConv

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.nn.conv.sage import Matrices, TypedEdges, convolve_relations
from pyg_direct.ops.aggregate.sum_rows import Transposed
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.runtime.cuda.graph_capture import waits_refused
from tests.hetero_data import make_hetero
from tests.nn.convolutions import assert_near

WIDTH, OWN_WIDTH, OUT = 6, 5, 4
# Tables of 7 and 5 rows of sources, and one of 3 rows that are targets alone.
ROWS = [(7, WIDTH), (5, WIDTH), (3, OWN_WIDTH)]
# (table of the sources, table of the targets, edges) of each relation; relations 0 and 2 lead to one type.
RELATIONS = [(0, 1, 9), (1, 2, 4), (1, 1, 0), (0, 0, 11)]
GROUPS = [[0, 2], [1], [3]]


def make_parts(device, dtype=torch.float64, has_bias=True, seed=0):
    """(tables, matrices, edges, (sources, targets) of each relation)."""
    draw = torch.Generator().manual_seed(seed)
    pairs = []
    for source, target, count in RELATIONS:
        ends = [torch.randint(ROWS[place][0], (count,), generator=draw) for place in (source, target)]
        order = ends[1].argsort(stable=True)
        pairs.append((ends[0][order].to(device), ends[1][order].to(device)))
    starts, sizes = [0, 7, 12], [ROWS[target][0] for _, target, _ in RELATIONS]
    row = torch.cat([pair[0] + starts[source] for pair, (source, _, _) in zip(pairs, RELATIONS, strict=True)])
    begins = torch.tensor([0, *sizes]).cumsum(0)
    target = torch.cat([pair[1] + int(begin) for pair, begin in zip(pairs, begins[:-1], strict=True)])
    counts = torch.bincount(target.cpu(), minlength=sum(sizes))
    indptr = F.pad(counts.cumsum(0), (1, 0)).to(device)

    def rand(*shape):
        return torch.randn(*shape, dtype=dtype, generator=draw).to(device).requires_grad_()

    matrices = [Matrices(rand(OUT, WIDTH), rand(OUT) if has_bias else None, rand(OUT, ROWS[target][1]))
                for _, target, _ in RELATIONS]  # fmt: skip
    ends = [source for source, _, _ in RELATIONS], [target for _, target, _ in RELATIONS]
    edges = TypedEdges(indptr, row, target, sizes, *ends, 2, GROUPS, None)
    return [rand(*shape) for shape in ROWS], matrices, edges, pairs


def expect(tables, matrices, pairs, reduce):
    outs = []
    for (source, target, _), (row, to), part in zip(RELATIONS, pairs, matrices, strict=True):
        own = tables[target]
        sums = own.new_zeros(len(own), WIDTH).index_add(0, to, tables[source][row])
        if reduce == "mean":
            sums = sums / torch.bincount(to, minlength=len(own)).clamp(min=1)[:, None]
        outs.append(F.linear(sums, part.weight, part.bias) + F.linear(own, part.own_weight))
    return [sum(outs[i] for i in group) for group in GROUPS]


def flatten(tables, matrices):
    return [*tables, *(part for one in matrices for part in one if part is not None)]


def turn(edges):
    return Transposed.of(edges.row, edges.target, 12)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "bare"])
def test_equals_torch(device, reduce, has_bias):
    tables, matrices, edges, pairs = make_parts(device, torch.float32, has_bias)
    expected, wanted = expect(tables, matrices, pairs, reduce), flatten(tables, matrices)
    # A GPU also adds in any order.
    for transposed in (turn(edges), None) if runs_on_gpu(tables[0]) else (turn(edges),):
        got = convolve_relations(tables, matrices, edges, reduce=reduce, transposed=transposed)

        grads = [torch.randn_like(out) for out in got]
        assert_near([*got, *torch.autograd.grad(got, wanted, grads)],
                    [*expected, *torch.autograd.grad(expected, wanted, grads, retain_graph=True)])  # fmt: skip
        with torch.no_grad():
            plain = convolve_relations(tables, matrices, edges, reduce=reduce)
        assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))


@pytest.mark.parametrize("again", [False, True], ids=["once", "to be differentiated"])
@pytest.mark.parametrize("used", [0, 1, 2])
def test_results_that_are_not_used_give_no_gradient(device, used, again):
    tables, matrices, edges, pairs = make_parts(device)
    expected = expect(tables, matrices, pairs, "mean")[used].square().sum()
    got = convolve_relations(tables, matrices, edges, reduce="mean", transposed=turn(edges))[used].square().sum()
    wanted = flatten(tables, matrices)

    found = torch.autograd.grad(got, wanted, allow_unused=True, create_graph=again)
    other = torch.autograd.grad(expected, wanted, allow_unused=True)

    # Optimizers treat None differently from zeros.
    assert [grad is None for grad in found] == [grad is None for grad in other]
    assert_near([grad for grad in found if grad is not None], [grad for grad in other if grad is not None])


def test_only_wanted_gradients_are_computed(device):
    tables, matrices, edges, pairs = make_parts(device)
    tables = [table.detach() for table in tables]
    wanted = [matrices[0].bias, matrices[2].bias, matrices[3].own_weight]
    matrices = [Matrices(*(part if any(part is one for one in wanted) else part.detach() for part in group))
                for group in matrices]  # fmt: skip
    got = convolve_relations(tables, matrices, edges, reduce="sum")
    expected = expect(tables, matrices, pairs, "sum")

    sum(out.square().sum() for out in got).backward()

    other = torch.autograd.grad(sum(out.square().sum() for out in expected), wanted)
    assert_near([part.grad for part in wanted], list(other))


@pytest.mark.parametrize("again", [False, True], ids=["once", "to be differentiated"])
def test_relations_that_share_a_convolution_add_up_its_gradient(device, again):
    tables, matrices, edges, pairs = make_parts(device)
    # Relations 0 and 2 lead to one type, and 1 to another whose own rows are narrower.
    matrices[2], matrices[1] = matrices[0], matrices[0]._replace(own_weight=matrices[1].own_weight)
    wanted = list(dict.fromkeys(flatten(tables, matrices)))
    outs = convolve_relations(tables, matrices, edges, reduce="mean", transposed=turn(edges))

    got = torch.autograd.grad(sum(out.square().sum() for out in outs), wanted, create_graph=again)

    expected = expect(tables, matrices, pairs, "mean")
    assert_near(list(got), list(torch.autograd.grad(sum(out.square().sum() for out in expected), wanted)))


def test_gradients_are_differentiated_again(real_device):
    tables, matrices, edges, _ = make_parts(real_device)
    inputs = flatten(tables, matrices)

    def layer(*given):
        rest = list(given[3:])
        parts = [Matrices(*rest[3 * i : 3 * i + 3]) for i in range(len(RELATIONS))]
        return tuple(convolve_relations(given[:3], parts, edges, reduce="mean", transposed=turn(edges)))

    # On a GPU torch adds the gradients of gradients in any order.
    again = {"fast_mode": True, "nondet_tol": 1e-12 if runs_on_gpu(tables[0]) else 0.0}
    assert torch.autograd.gradcheck(layer, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(layer, inputs, **again)
    # Of some of them alone.
    assert torch.autograd.gradgradcheck(layer, [inputs[0].detach(), *inputs[1:]], **again)


def make_layer(device):
    """(layer, rows, edges) of a batch whose edges are known to be sorted, wide enough for a CPU to win."""
    data = make_hetero()
    for kind in data.node_types:
        data[kind].x = torch.rand(data[kind].num_nodes, 16)
    batch = next(iter(NeighborLoader(data, [3, 2], ("paper", torch.arange(12)), batch_size=12, device=device)))
    edges = {kind: pair for kind, pair in batch.edge_index_dict.items() if "nobody" not in kind}
    model = HeteroConv({kind: SAGEConv((16, 16), OUT) for kind in edges}).to(device)
    accelerate(model)
    ends = {end for kind in edges for end in (kind[0], kind[-1])}
    return model, {kind: rows.requires_grad_() for kind, rows in batch.x_dict.items() if kind in ends}, edges


def test_a_layer_is_one_step_of_autograd(real_device):
    model, x, edges = make_layer("cuda" if str(real_device).startswith("cuda") else "cpu")

    outs = model(x, edges)

    assert {type(out.grad_fn).__name__ for out in outs.values()} == {"_TypedLayerBackward"}
    assert len({id(out.grad_fn) for out in outs.values()}) == 1


@pytest.mark.gpu
def test_a_layer_does_not_wait_for_the_gpu():
    model, x, edges = make_layer("cuda")
    model(x, edges)
    with waits_refused():
        sum(out.sum() for out in model(x, edges).values()).backward()
    assert all(rows.grad is not None for rows in x.values())


@pytest.mark.gpu
def test_a_layer_is_captured_with_its_gradients():
    model, x, edges = make_layer("cuda")
    wanted = [*x.values(), *model.parameters()]

    def work():
        return torch.autograd.grad(sum(out.square().sum() for out in model(x, edges).values()), wanted)

    expected = work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work()
    with torch.no_grad():
        next(iter(x.values())).mul_(2)
    graph.replay()
    assert not torch.allclose(got[0], expected[0])
    assert_near(got, work())
