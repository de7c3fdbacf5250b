"""Models of PyG's that trim compute no rows that they drop, with PyG's results and gradients."""

import copy
import io

import pytest
import torch
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

from pyg_direct import accelerate
from pyg_direct.nn import trimming
from pyg_direct.nn.sorted_edges import register_sorted
from tests.nn.convolutions import assert_near

NODES, EDGES, WIDTH, CLASSES = [4, 7, 9, 11], [16, 30, 40], 8, 5
MODELS = {
    "sage": lambda **options: GraphSAGE(WIDTH, 16, 3, CLASSES, **options),
    "sage max": lambda **options: GraphSAGE(WIDTH, 16, 3, CLASSES, aggr="max", **options),
    "gcn": lambda **options: GCN(WIDTH, 16, 3, CLASSES, **options),
    "gcn to narrow rows": lambda **options: GCN(WIDTH, 4, 3, CLASSES, **options),
    "gin": lambda **options: GIN(WIDTH, 16, 3, CLASSES, **options),
    "gat": lambda **options: GAT(WIDTH, 16, 3, CLASSES, **options),
    "gat of heads": lambda **options: GAT(WIDTH, 16, 3, CLASSES, heads=4, **options),
    "gatv2": lambda **options: GAT(WIDTH, 16, 3, CLASSES, heads=2, v2=True, **options),
}


class Batch:
    """Three hops; an edge of the first two may be a loop."""

    def __init__(self, device="cpu"):
        generator = torch.Generator().manual_seed(2)
        rows, cols = [], []
        for hop, count in enumerate(EDGES):
            low, high, known = sum(NODES[:hop]), sum(NODES[: hop + 1]), sum(NODES[: hop + 2])
            cols.append(torch.randint(low, high, (count,), generator=generator).sort().values)
            rows.append(torch.randint(0, known, (count,), generator=generator))
        rows[0][0] = cols[0][0]
        self.edge_index = torch.stack([torch.cat(rows), torch.cat(cols)]).to(device)
        register_sorted(self.edge_index, NODES, EDGES)
        self.x = torch.randn(sum(NODES), WIDTH, generator=generator).to(device)
        self.weight = (torch.rand(sum(EDGES), generator=generator) + 0.1).to(device)


def run(model, batch, **kwargs):
    x = batch.x.clone().requires_grad_()
    out = model(x, batch.edge_index, num_sampled_nodes_per_hop=NODES, num_sampled_edges_per_hop=EDGES, **kwargs)
    return [out, *torch.autograd.grad(out[: NODES[0]].square().sum(), [x, *model.parameters()])]


@pytest.fixture
def kept(monkeypatch):
    """(rows of sources, rows computed) of each layer that computes fewer."""
    seen, plain = [], trimming.Kept

    def note(rows, part):
        seen.append((rows.shape[0], part.shape[0]))
        return plain(rows, part)

    monkeypatch.setattr(trimming, "Kept", note)
    return seen


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_equals_pyg_with_fewer_rows(device, name, kept):
    batch, model = Batch(device), MODELS[name]().to(device)
    expected = run(model, batch)

    accelerate(model)
    got = run(model, batch)

    assert_near(got, expected)
    assert kept == [(31, 20), (20, 11)]


@pytest.mark.parametrize("improved", [False, True])
def test_weights_of_edges_are_trimmed_too(device, improved, kept):
    batch, model = Batch(device), MODELS["gcn"](improved=improved).to(device)
    weights = [batch.weight.clone().requires_grad_() for _ in range(2)]
    expected = run(model, batch, edge_weight=weights[0])
    (expected_grad,) = torch.autograd.grad(model(batch.x, batch.edge_index, weights[0]).square().sum(), weights[0])

    accelerate(model)
    got = run(model, batch, edge_weight=weights[1])
    (got_grad,) = torch.autograd.grad(model(batch.x, batch.edge_index, weights[1]).square().sum(), weights[1])

    assert_near([*got, got_grad], [*expected, expected_grad])
    assert len(kept) == 2


@pytest.mark.parametrize(("name", "options"), [("sage", {"norm": "batch_norm"}), ("sage", {"norm": "graph_norm"}),
                                               ("gin", {"norm": "batch_norm"})])  # fmt: skip
def test_layers_that_mix_rows_get_all_of_them(name, options, kept):
    batch, model = Batch(), MODELS[name](**options)
    expected = run(model, batch)

    accelerate(model)

    assert_near(run(model, batch), expected)
    assert kept == []


@pytest.mark.parametrize("case", ["a hook", "other edges", "a replaced layer", "undone"])
def test_anything_else_gets_all_rows(case, kept):
    batch, model = Batch(), MODELS["sage"]()
    expected = run(model, batch)
    accelerated = accelerate(model)
    if case == "a hook":
        for layer in model.convs:
            layer.register_forward_hook(lambda *_: None)
    elif case == "other edges":
        batch.edge_index = batch.edge_index.clone()
    elif case == "a replaced layer":
        for number, layer in enumerate(model.convs):
            plain = GraphSAGE(WIDTH, 16, 3, CLASSES).convs[number]
            plain.load_state_dict(layer.state_dict())
            model.convs[number] = plain
    else:
        accelerated.undo()

    assert_near(run(model, batch), expected)
    assert kept == []


def test_models_are_saved_and_copied_as_before():
    batch, model = Batch(), MODELS["sage"]()
    keys = list(model.state_dict())
    accelerate(model)
    expected, file = run(model, batch), io.BytesIO()

    torch.save(model, file)
    file.seek(0)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_near(run(again, batch), expected)

    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules() if "_model" in name] == []


def test_rows_of_all_layers_without_trimming(kept):
    batch, model = Batch(), MODELS["sage"]()
    expected = model(batch.x, batch.edge_index)

    accelerate(model)

    torch.testing.assert_close(model(batch.x, batch.edge_index), expected, rtol=1e-4, atol=1e-5)
    assert kept == []
