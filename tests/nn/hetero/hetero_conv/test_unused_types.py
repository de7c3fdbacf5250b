"""Types in the results of layers that nothing in a pass reads: recorded passes leave them out, and nothing else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import BatchNorm, GATConv, HeteroConv, HGTConv, SAGEConv

from pyg_direct import accelerate
from pyg_direct.nn.hetero.unread_rows import RowsOfPass
from pyg_direct.nn.whole_graphs import GraphKeeper
from tests.nn.tape import record_on_tapes

SIZES, CLASSES = {"a": 30, "b": 40, "c": 20}, 4
RELATIONS = [("a", "to", "b"), ("c", "to", "b"), ("b", "to", "a"), ("b", "to", "c"), ("c", "to", "a")]


@pytest.fixture
def counts(monkeypatch):
    """Operations of each recording; recordings are made by a fake without a GPU."""
    found = []
    record_on_tapes(monkeypatch, lambda work, made: found.append((work.__name__, len(made.calls))))
    return found


class Typed(torch.nn.Module):
    """Two layers, as PyG's `hetero_conv_dblp.py`; the result is of type `a`."""

    def __init__(self, kind=SAGEConv, use=None, **options):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            HeteroConv({pair: kind((width, width), 8, **options) for pair in RELATIONS}, "sum") for width in (6, 8)
        )
        self.last, self.norms = torch.nn.Linear(8, CLASSES), torch.nn.ModuleDict({key: BatchNorm(8) for key in SIZES})
        self.use = use

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = {key: x.relu() for key, x in conv(x_dict, edge_index_dict).items()}
        out = self.last(x_dict["a"])
        if self.use == "mask":
            out = out * (x_dict["b"].detach().amax() > 0)
        elif self.use == "index":
            out = out.index_select(0, x_dict["c"].sum(1).argsort())
        elif self.use == "norm":
            self.norms["b"](x_dict["b"])
        elif self.use == "written":
            out = torch.zeros_like(out).copy_(out)
            out[:20, :4] += x_dict["c"][:, :4]
        elif self.use == "both":
            out = out, x_dict["c"]
        return out


@pytest.fixture
def given():
    draw = torch.Generator().manual_seed(0)
    x_dict = {key: torch.randn(size, 6, generator=draw, dtype=torch.float64) for key, size in SIZES.items()}
    edges = {pair: torch.stack([torch.randint(SIZES[end], (90,), generator=draw) for end in pair[::2]])
             for pair in RELATIONS}  # fmt: skip
    return x_dict, edges


def learn(model, given, epochs=12):
    """Return losses, gradients and results of a loop."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        out = model(*given)
        out, *more = out if isinstance(out, tuple) else (out,)
        loss = F.cross_entropy(out, torch.arange(len(out)) % CLASSES) + sum(part.square().mean() for part in more)
        loss.backward()
        del out, more
        seen += [loss.detach(), *(part.grad for part in model.parameters())]
        optimizer.step()
        model.eval()
        with torch.no_grad():
            out = model(*given)
            seen += out if isinstance(out, tuple) else (out,)
    return [*seen, *(value.clone() for value in model.state_dict().values())]


def compare(model, given):
    """Train a model, and a copy that is not replayed; return the replay."""
    torch.manual_seed(0)
    model = model.double()
    ordinary = copy.deepcopy(model)
    accelerate(ordinary, replay=False)
    replay = accelerate(model, replay="auto").replay
    for found, expected in zip(learn(model, given), learn(ordinary, given), strict=True):
        # Parameters of unused relations have no gradient.
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert replay.replayed >= 5
    return replay


def list_unused(replay):
    """List the unused types of the calls, in the recordings of steps and of evaluations."""
    found = []
    for (passes,) in replay._passes.values():
        types = passes.recording._rows
        found.append(None if types is None else [sorted(types._unused.get(call, ())) for call in range(2)])
    return found


@pytest.mark.parametrize("kind", [SAGEConv, GATConv])
def test_types_that_no_result_needs_are_left_out(counts, given, kind):
    options = {"add_self_loops": False} if kind is GATConv else {}
    replay = compare(Typed(kind, **options), given)
    pruned = list(counts)
    counts.clear()
    compare(Typed(kind, "both", **options), given)

    # `c` of the first layer is a source of `a` in the second.
    assert list_unused(replay) == [[[], ["b", "c"]]] * 2
    assert [name for name, _ in pruned] == ["_run", "_return", "_run"]
    assert all(few < many for (_, few), (_, many) in zip(pruned, counts, strict=True))


class Attends(torch.nn.Module):
    """As PyG's `hgt_dblp.py`."""

    def __init__(self, use=None):
        super().__init__()
        self.lins = torch.nn.ModuleDict({key: torch.nn.Linear(6, 8) for key in SIZES})
        self.conv, self.last = HGTConv(8, 8, (list(SIZES), RELATIONS), heads=2), torch.nn.Linear(8, CLASSES)
        self.use = use

    def forward(self, x_dict, edge_index_dict):
        rows = {key: self.lins[key](x).relu() for key, x in x_dict.items()}
        found = self.conv(rows, edge_index_dict)
        out = self.last(found["b"])
        return (out, found["a"], found["c"]) if self.use == "both" else out


def test_attention_leaves_out_types_and_keeps_their_gradients_of_zero(counts, given):
    replay = compare(Attends(), given)
    pruned = list(counts)
    counts.clear()
    compare(Attends("both"), given)

    assert [types[0] for types in list_unused(replay)] == [["a", "c"]] * 2
    assert all(few < many for (_, few), (_, many) in zip(pruned, counts, strict=True))
    # Rows of all types lie in one tensor.
    steps = replay._passes[True, True][0].recording
    assert any(steps._zeroed)


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize(("use", "unused"), [("mask", ["c"]), ("index", ["b"]), ("written", ["b"]), ("both", ["b"])])
def test_types_that_reach_a_result_in_any_way_are_computed(given, use, unused):
    assert list_unused(compare(Typed(use=use), given)) == [[[], unused]] * 2


@pytest.mark.usefixtures("counts")
def test_statistics_of_an_unused_type_are_kept(given):
    replay = compare(Typed(use="norm"), given)

    # In evaluation they are only read.
    assert list_unused(replay) == [None, [[], ["b", "c"]]]


@pytest.mark.usefixtures("counts")
def test_passes_that_fail_without_a_type_are_recorded_with_it(given, monkeypatch):
    class Strict(Typed):
        def forward(self, x_dict, edge_index_dict):
            self.convs[1].register = None
            out = self.convs[1](self.convs[0](x_dict, edge_index_dict), edge_index_dict)
            if torch.is_grad_enabled() and not out["b"].requires_grad:
                raise ValueError("rows must have a gradient")
            return self.last(out["a"])

    replay = compare(Strict(), given)

    assert list_unused(replay) == [None, [[], ["b", "c"]]]


def test_numbers_that_reach_the_host_are_used():
    types = RowsOfPass()
    conv = HeteroConv({pair: SAGEConv((6, 6), 8) for pair in RELATIONS})
    accelerate(torch.nn.ModuleList([conv]), replay=False)
    x_dict = {key: torch.randn(size, 6) for key, size in SIZES.items()}
    edges = {pair: torch.randint(20, (2, 50)) for pair in RELATIONS}
    with types.follow():
        out = conv(x_dict, edges)
        result = out["a"] * float(out["c"].detach().sum())

    assert types.find_unread([result])
    assert {call: list(rows) for call, rows in types._unused.items()} == {0: ["b"]}
    with types.leave_out(2.0):
        left = conv(x_dict, edges)
    assert list(left) == list(out)
    assert bool((left["b"] == 2.0).all())
    assert left["b"].shape == out["b"].shape
    torch.testing.assert_close(left["a"], out["a"])


def test_a_part_of_the_relations_takes_no_index_from_the_host():
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    conv = HGTConv(6, 8, (list(SIZES), RELATIONS), heads=2)
    accelerate(torch.nn.ModuleList([conv]), replay=False)
    x_dict = {key: torch.randn(size, 6) for key, size in SIZES.items()}
    edges = {pair: torch.randint(20, (2, 50)) for pair in RELATIONS[::2]}

    with GraphKeeper(edges.values()), Names():
        conv(x_dict, edges)

    assert conv._paths.accelerated == 1
    # A list as an index would be copied to a GPU, which a recording cannot wait for.
    assert "aten::index.Tensor" not in names
