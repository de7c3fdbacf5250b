"""Whole graphs with types whose passes are replayed, as in ordinary passes."""

import pytest
import torch
from torch_geometric.nn import GATConv, GraphConv, HeteroConv, HGTConv, SAGEConv

from pyg_direct.nn.conv import sage
from tests.nn.convolutions import assert_near
from tests.nn.replays import pair_with_ordinary

CLASSES = 5


class Typed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = HeteroConv({("a", "to", "b"): SAGEConv((16, 16), 8), ("b", "of", "a"): SAGEConv((16, 16), 8),
                                ("b", "on", "b"): GATConv(16, 8, add_self_loops=False)})  # fmt: skip
        self.last = torch.nn.Linear(8, CLASSES)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {kind: x.relu() for kind, x in self.conv(x_dict, edge_index_dict).items()}
        return {kind: self.last(x) for kind, x in x_dict.items()}


class Attends(torch.nn.Module):
    """As PyG's `hgt_dblp.py`."""

    def __init__(self):
        super().__init__()
        self.conv = HGTConv(16, 8, (["a", "b"], [("a", "to", "b"), ("b", "of", "a"), ("b", "on", "b")]), heads=2)

    def forward(self, x_dict, edge_index_dict):
        return {kind: x.relu() for kind, x in self.conv(x_dict, edge_index_dict).items()}


@pytest.mark.parametrize("kind", [Typed, Attends])
def test_models_with_types(device, kind):
    torch.manual_seed(0)
    x_dict = {"a": torch.randn(60, 16, device=device).double(), "b": torch.randn(80, 16, device=device).double()}
    sizes = {"a": 60, "b": 80}
    edges = {kind: torch.stack([torch.randint(sizes[end], (300,)) for end in (kind[0], kind[2])]).to(device)
             for kind in [("a", "to", "b"), ("b", "of", "a"), ("b", "on", "b")]}  # fmt: skip
    ordinary, model, replay = pair_with_ordinary(kind(), device)
    for _ in range(14):
        gradients = []
        for trained in (ordinary, model):
            trained.zero_grad()
            out = trained(x_dict, dict(edges))
            (out["a"].square().sum() + out["b"].sum()).backward()
            gradients.append([out["a"].detach(), out["b"].detach(), *(part.grad for part in trained.parameters())])
            del out
        assert_near(*gradients)

    assert replay.replayed >= 5
    # Only in a recording are such graphs not left to PyG, which waits for a GPU.
    assert kind is Typed or model.conv._paths.accelerated > 0


RELATIONS = [("a", "to", "b"), ("c", "to", "b"), ("b", "to", "b"), ("b", "of", "a"), ("b", "of", "c")]


class Joined(torch.nn.Module):
    """As PyG's `hetero_conv_dblp.py`: relations of several widths into one type."""

    def __init__(self, *sums):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            HeteroConv({kind: (GraphConv if kind[0] == "c" else SAGEConv)((-1, -1), 8) for kind in RELATIONS}, aggr)
            for aggr in sums
        )

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = {kind: x.relu() for kind, x in conv(x_dict, edge_index_dict).items()}
        return x_dict["b"]


def test_relations_of_a_whole_graph_multiply_own_rows_once(device, monkeypatch):
    torch.manual_seed(0)
    widths, sizes, sums = {"a": 16, "b": 24, "c": 9}, {"a": 60, "b": 80, "c": 30}, []
    x_dict = {kind: torch.randn(sizes[kind], widths[kind], device=device).double() for kind in sizes}
    model = Joined("mean", "sum")
    edges = {kind: torch.stack([torch.randint(sizes[end], (300,)) for end in (kind[0], kind[2])]).to(device)
             for kind in RELATIONS}  # fmt: skip
    with torch.no_grad():
        model({kind: x.float().cpu() for kind, x in x_dict.items()}, {kind: e.cpu() for kind, e in edges.items()})
    ordinary, model, replay = pair_with_ordinary(model, device)
    add_up = sage._add_up_parts
    monkeypatch.setattr(sage, "_add_up_parts", lambda parts: sums.append(len(parts)) or add_up(parts))
    for _ in range(13):
        found = []
        for trained in (ordinary, model):
            trained.zero_grad()
            loss = trained(x_dict, dict(edges)).square().sum()
            weight = trained.convs[0].convs["a", "to", "b"].lin_l.weight
            (first,) = torch.autograd.grad(loss, [weight], retain_graph=True)
            loss.backward()
            # Relations of a type whose result is not used get no gradient.
            found.append([loss.detach(), first, *[part.grad for part in trained.parameters() if part.grad is not None]])
            del loss
        assert_near(*found)

    assert replay.replayed >= 4
    assert 3 in sums


class ReadBackward(torch.autograd.Function):
    """A gradient that depends on rows that forward keeps, and does not read."""

    @staticmethod
    def forward(ctx, out, rows):
        ctx.save_for_backward(rows)
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + (ctx.saved_tensors[0] > 0).double().mean()), None


KINDS = [("a", "r", "a"), ("b", "s", "a"), ("c", "t", "a"), ("a", "u", "b"), ("c", "v", "b"), ("a", "w", "c")]


class Kept(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            HeteroConv({kind: GATConv((width, width), 4, 2, add_self_loops=False) for kind in KINDS})
            for width in (64, 8, 8)
        )

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return ReadBackward.apply(x_dict["a"][:12], x_dict["b"])


def test_types_that_backward_alone_reads_are_computed(device):
    torch.manual_seed(0)
    sizes = {"a": 40, "b": 30, "c": 20}
    x_dict = {kind: torch.randn(size, 64, device=device).double() for kind, size in sizes.items()}
    edges = {kind: torch.stack([torch.randint(sizes[kind[0]], (150,)), torch.randint(sizes[kind[2]] - 5, (150,))])
             for kind in KINDS}  # fmt: skip
    edges = {kind: pairs.to(device) for kind, pairs in edges.items()}
    ordinary, model, replay = pair_with_ordinary(Kept(), device)
    for _ in range(13):
        found = []
        for trained in (ordinary, model):
            trained.zero_grad()
            trained(x_dict, dict(edges)).tanh().square().mean().backward()
            found.append({name: part.grad for name, part in trained.named_parameters()})
        names = [name for name, grad in found[0].items() if grad is not None]
        assert_near(*[[grads[name] for name in names] for grads in found])

    assert replay.replayed >= 4
