"""RGCNConv if most pairs of a relation and a target have no edges: PyG's results, and no row for such pairs."""

import pytest
import torch
from torch_geometric.nn import RGCNConv

from pyg_direct import accelerate
from pyg_direct.nn.conv import rgcn
from tests.nn.conv.rgcn.test_relational import KINDS, OUT, WIDTH, run
from tests.nn.convolutions import assert_near
from tests.nn.test_trimming import Batch

RELATIONS = 9


@pytest.fixture
def reduced(monkeypatch):
    """Record the rows of sums, with every size worth a launch."""
    made, aggregate = [], rgcn.aggregate
    for name in ("_A_RELATION", "_PARTING"):
        monkeypatch.setattr(rgcn, name, {"cuda": 0, "cpu": 0})

    def count(*args, **kwargs):
        out = aggregate(*args, **kwargs)
        made.append(out.shape[0])
        return out

    monkeypatch.setattr(rgcn, "aggregate", count)
    return made


def make_types(batch, num_edges):
    # The third relation has no edges.
    edge_type = torch.randint(RELATIONS, (num_edges,))
    return torch.where(edge_type == 2, 3, edge_type).to(batch.edge_index.device)


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_edges", [86, 46, 1])
def test_equals_pyg_with_a_row_for_each_pair_that_has_edges(device, kind, num_edges, reduced):
    batch, conv = Batch(device), RGCNConv(WIDTH, OUT, RELATIONS, **KINDS[kind]).to(device)
    edge_index, edge_type = batch.edge_index[:, :num_edges], make_types(batch, num_edges)
    expected = run(conv, batch.x, edge_index, edge_type)

    accelerated = accelerate(conv)
    got = run(conv, batch.x, edge_index, edge_type)

    assert_near([part for part in got if part is not None], [part for part in expected if part is not None])
    pairs = len(set(zip(edge_index[1].tolist(), edge_type.tolist(), strict=True)))
    assert reduced == [pairs, 31]
    accelerated.undo()
    run(conv, batch.x, edge_index, edge_type)
    assert len(reduced) == 2


def test_sources_and_targets_may_differ(device, reduced):
    batch, conv = Batch(device), RGCNConv((WIDTH, 5), OUT, RELATIONS).to(device)
    x, edge_type = (batch.x, torch.randn(20, 5, device=device)), make_types(batch, 86)
    expected = run(conv, x, batch.edge_index, edge_type)

    accelerate(conv)

    assert_near(run(conv, x, batch.edge_index, edge_type), expected)
    assert len(reduced) == 2


def test_gradients_are_differentiated_again(reduced):
    batch, conv = Batch(), RGCNConv(WIDTH, OUT, RELATIONS).double()
    edge_type = make_types(batch, 86)

    def differentiate():
        x = batch.x.double().requires_grad_()
        leaves = [x, *conv.parameters()]
        grads = torch.autograd.grad(conv(x, batch.edge_index, edge_type).pow(3).sum(), leaves, create_graph=True)
        return [*grads, *torch.autograd.grad(sum(part.square().sum() for part in grads), leaves)]

    expected = differentiate()
    accelerate(conv)

    assert_near(differentiate(), expected, 1e-8, 1e-8)
    assert len(reduced) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_near_the_exact_result(real_device, dtype, reduced):
    batch, conv = Batch(real_device), RGCNConv(WIDTH, OUT, RELATIONS).to(real_device, dtype)
    edge_type = make_types(batch, 86)
    accelerate(conv)

    got = conv(batch.x.to(dtype), batch.edge_index, edge_type).double()

    exact = conv.double()(batch.x.to(dtype).double(), batch.edge_index, edge_type)
    assert (got - exact).norm() <= 1e-2 * exact.norm()
    assert len(reduced) == 4


@pytest.mark.parametrize("stray", [-1, RELATIONS])
def test_a_relation_that_is_none_is_left_to_pyg(stray, reduced):
    batch, conv = Batch(), RGCNConv(WIDTH, OUT, RELATIONS)
    edge_type = make_types(batch, 86)
    edge_type[3] = stray
    accelerated = accelerate(conv)

    def call():
        try:
            return conv(batch.x, batch.edge_index, edge_type)
        except RuntimeError as error:
            return str(error)

    got = call()
    accelerated.undo()
    expected = call()

    assert torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected
    assert reduced == []


@pytest.mark.parametrize(("edges", "relations", "few"), [(15, 2, False), (14, 2, True), (10, 1, False), (0, 9, False)])
def test_edges_are_few_where_many_of_the_pairs_have_none(edges, relations, few, monkeypatch):
    for name in ("_A_RELATION", "_PARTING"):
        monkeypatch.setattr(rgcn, name, {"cpu": 0})

    assert rgcn.are_few(torch.zeros(edges, dtype=torch.int64), 10, relations, 4) is few


def test_few_numbers_are_not_worth_launches():
    edges = torch.zeros(10, dtype=torch.int64)

    assert not rgcn.are_few(edges, 1000, 3, 4)
    assert rgcn.are_few(edges, 100_000, 3, 4)
