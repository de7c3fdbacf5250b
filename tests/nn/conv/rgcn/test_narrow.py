"""Layers over relations in bfloat16 and float16: PyG's results and gradients in fp32, up to 2e-2 of the largest.

Rounded scores of GATConv change sides of leaky ReLU's kink, and the gradients of its vectors cancel. PyG's own then
differ by up to several times the largest. The gradients of a GATConv must agree to 2e-2 together, by their norm.
"""

import copy

import pytest
import torch
from torch_geometric.nn import GATConv, GINConv, GraphConv, HeteroConv, HGTConv, RGCNConv, SAGEConv, to_hetero

from pyg_direct import accelerate
from pyg_direct.nn.conv import gat, gin, rgcn, sage
from pyg_direct.nn.hetero import attention
from tests.nn.convolutions import Batch
from tests.nn.hetero.hetero_conv.test_kinds import WIDTH, make_batch

OUT, TOLERANCE = 8, 2e-2
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def calls(monkeypatch):
    """Dtypes of the rows that our operators were asked to sum."""
    made = []
    for module, name in ((gin, "sum_known"), (sage, "sum_known"), (gat, "attend"),
                         (rgcn, "aggregate"), (attention, "aggregate")):  # fmt: skip
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, *args, plain=plain, **kwargs: (
            made.append(x.dtype) or plain(x, *args, **kwargs)))  # fmt: skip
    return made


def check(model, x, dtype, convolve, bends=False, gives=None):
    """Hold an accelerated copy in a dtype, which may give another, to PyG's in fp32, of equal parameters and rows."""
    fast = copy.deepcopy(model).to(dtype)
    wide = copy.deepcopy(fast).float()
    accelerate(fast)

    def run(model, dtype):
        rows = {name: part.detach().to(dtype).requires_grad_() for name, part in x.items()}
        outs = [part for part in convolve(model, rows) if part is not None]
        total = sum(part.float().square().sum() for part in outs)
        grads = torch.autograd.grad(total, [*rows.values(), *model.parameters()], allow_unused=True)
        return outs, [grad for grad, part in zip(grads, [*rows.values(), *model.parameters()], strict=True)
                      if part.numel()]  # fmt: skip

    x = {name: part.to(dtype) for name, part in x.items()}
    (got, grads), (expected, expected_grads) = run(fast, dtype), run(wide, torch.float32)
    # Optimizers treat None differently from zeros.
    assert [grad is None for grad in grads] == [grad is None for grad in expected_grads]
    pairs = [(a, b) for a, b in zip(grads, expected_grads, strict=True) if b is not None]
    assert {part.dtype for part in got} == {gives or dtype}
    assert all(part.dtype == dtype for part, _ in pairs)
    compare(got, expected)
    if bends:
        error, size = (torch.cat([part.flatten() for part in parts]).norm()
                       for parts in ([a.float() - b for a, b in pairs], [b for _, b in pairs]))  # fmt: skip
        assert error <= TOLERANCE * size
    else:
        compare(*zip(*pairs, strict=True))


def compare(got, expected):
    for one, other in zip(got, expected, strict=True):
        largest = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one.float(), other, rtol=TOLERANCE, atol=TOLERANCE * largest)


CONVOLUTIONS = {
    "sage": lambda: SAGEConv((WIDTH, WIDTH), OUT),
    "graph": lambda: GraphConv((WIDTH, WIDTH), OUT),
    "gin": lambda: GINConv(torch.nn.Linear(WIDTH, OUT), eps=0.25, train_eps=True),
    "gat": lambda: GATConv((WIDTH, WIDTH), 4, heads=2, add_self_loops=False),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_relations_of_a_hetero_conv(real_device, kind, dtype, calls):
    x, edges = make_batch(real_device)
    model = HeteroConv({name: CONVOLUTIONS[kind]() for name in edges}).to(x["paper"].device)

    check(model, x, dtype, lambda model, rows: model(rows, edges).values(), bends=kind == "gat")

    assert calls == [dtype]


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = SAGEConv((WIDTH, WIDTH), OUT)
        self.second = GATConv((OUT, OUT), 4, heads=2, add_self_loops=False)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_models_of_to_hetero(real_device, dtype, calls):
    x, edges = make_batch(real_device)
    nodes = sorted({end for name in edges for end in (name[0], name[-1])})
    model = to_hetero(_Model(), (nodes, list(edges))).to(x["paper"].device)

    check(model, {name: x[name] for name in nodes}, dtype, lambda model, rows: model(rows, edges).values(), bends=True)

    assert calls == [dtype] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"num_blocks": 2, "aggr": "sum"}], ids=str)
def test_rgcn(real_device, options, dtype, calls):
    batch = Batch(real_device)
    x = torch.randn(batch.num_nodes, WIDTH, device=real_device)
    edge_type = torch.randint(3, (batch.edge_index.shape[1],)).to(real_device)
    model = RGCNConv(WIDTH, OUT, 3, **options).to(real_device)

    # PyG adds relations up in fp32.
    check(model, {"x": x}, dtype, lambda model, rows: [model(rows["x"], batch.edge_index, edge_type)],
          gives=torch.float32)  # fmt: skip

    assert calls == [dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hgt(real_device, dtype, calls):
    x, edges = make_batch(real_device)
    kinds = sorted({end for name in edges for end in (name[0], name[-1])})
    model = HGTConv(WIDTH, 16, (kinds, list(edges)), heads=2).to(x["paper"].device)

    check(model, {name: x[name] for name in kinds}, dtype, lambda model, rows: model(rows, edges).values())

    assert calls == [dtype]
