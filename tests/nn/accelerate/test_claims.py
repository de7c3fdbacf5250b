"""`accelerate` serves what it claims to serve, for every option of the convolutions; results are PyG's."""

import itertools

import pytest
import torch
from torch_geometric.nn import Aggregation, conv as convs

from pyg_direct import accelerate
from pyg_direct.nn import any_convolution
from pyg_direct.nn.sorted_edges import register_sorted
from pyg_direct.ops.run_kernel import runs_on_gpu
from tests.nn.convolutions import EDGES, NODES, OUT, WIDTH, Batch, assert_near, note_forward

# PyG's own code, which results are compared with, on a GPU without torch_scatter.
pytestmark = pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")


def make_network(width=WIDTH):
    return torch.nn.Linear(width, OUT)


# Each makes a layer of a width, with more options, and its other arguments beside rows and edges.
LAYERS = {
    "SAGEConv": (lambda width=WIDTH, **more: convs.SAGEConv(width, OUT, **more), ()),
    "GraphConv": (lambda width=WIDTH, **more: convs.GraphConv(width, OUT, **more), ()),
    "GraphConv of weights": (lambda **more: convs.GraphConv(WIDTH, OUT, **more), ("edge_weight",)),
    "GCNConv": (lambda width=WIDTH, out=OUT, **more: convs.GCNConv(width, out, **more), ()),
    "GCNConv of weights": (lambda **more: convs.GCNConv(WIDTH, OUT, **more), ("edge_weight",)),
    "GINConv": (lambda width=WIDTH, **more: convs.GINConv(make_network(width), **more), ()),
    "GINEConv": (lambda width=WIDTH, **more: convs.GINEConv(make_network(width), edge_dim=3, **more), ("edge_attr",)),
    "GATConv": (lambda width=WIDTH, **more: convs.GATConv(width, OUT, **{"heads": 2, **more}), ()),
    "GATConv of edges": (lambda **more: convs.GATConv(WIDTH, OUT, edge_dim=3, **more), ("edge_attr",)),
    "GATv2Conv": (lambda width=WIDTH, **more: convs.GATv2Conv(width, OUT, **{"heads": 2, **more}), ()),
    "GATv2Conv of edges": (lambda **more: convs.GATv2Conv(WIDTH, OUT, edge_dim=3, **more), ("edge_attr",)),
    "RGCNConv": (lambda width=WIDTH, **more: convs.RGCNConv(width, OUT, 3, **more), ("edge_type",)),
    "TransformerConv": (lambda width=WIDTH, **more: convs.TransformerConv(width, OUT, **{"heads": 2, **more}), ()),
    "TransformerConv of edges": (lambda **more: convs.TransformerConv(WIDTH, OUT, edge_dim=3, **more), ("edge_attr",)),
    "EdgeConv": (lambda width=WIDTH, **more: convs.EdgeConv(make_network(2 * width), **more), ()),
    "NNConv": (lambda **more: convs.NNConv(WIDTH, OUT, torch.nn.Linear(3, WIDTH * OUT), **more), ("edge_attr",)),
    "GENConv": (lambda **more: convs.GENConv(WIDTH, OUT, **more), ()),
    "GENConv of edges": (lambda **more: convs.GENConv(WIDTH, OUT, edge_dim=3, **more), ("edge_attr",)),
    "FiLMConv": (lambda **more: convs.FiLMConv(WIDTH, OUT, **more), ()),
    "ResGatedGraphConv": (lambda **more: convs.ResGatedGraphConv(WIDTH, OUT, **more), ()),
    "ResGatedGraphConv of edges": (lambda **more: convs.ResGatedGraphConv(WIDTH, OUT, edge_dim=3, **more),
                                   ("edge_attr",)),
    "SuperGATConv": (lambda **more: convs.SuperGATConv(WIDTH, OUT, heads=2, **more).eval(), ()),
}  # fmt: skip
AGGREGATIONS = ["add", "mean", "max", "std", ["add"]]
# PyG's own loops, a layer's own weights, or none.
OWN_EDGES = [{}, {"add_self_loops": False}]
MORE = {
    "SAGEConv": [{"root_weight": False}, {"project": True}, {"normalize": True}, {"width": 1}, {"width": -1},
                 {"aggr": "lstm"}, {"aggr": "min"}, {"aggr": "median"}, {"aggr": ["mean", "max"]},
                 {"aggr": "powermean", "aggr_kwargs": {"learn": True}}],
    "GraphConv": [{"width": 1}],
    "GCNConv": [{"normalize": False}, {"cached": True}, {"cached": True, "add_self_loops": False}, {"improved": True},
                {"width": 1}, {"out": 3}, {"out": 3, "normalize": False}],
    "GCNConv of weights": [{"normalize": False}, {"cached": True}],
    "GINConv": [{"train_eps": True}, {"width": 1}],
    "GINEConv": [{"train_eps": True}],
    "GATConv": [{"residual": True, "concat": False}, {"heads": 1}],
    "GATv2Conv": [{"residual": True}, {"share_weights": True}],
    "TransformerConv": [{"beta": True}, {"concat": False, "beta": True}, {"root_weight": False}, {"heads": 1},
                        {"width": 1}],
    "EdgeConv": [{"width": 1}],
    "NNConv": [{"root_weight": False}],
    "GENConv": [{"learn_t": True}, {"aggr": "softmax_sg"}, {"aggr": "powermean", "learn_p": True}, {"eps": 0.0},
                {"eps": 0.0, "aggr": "max"}],
    "FiLMConv": [{"act": None}, {"act": torch.nn.Tanh()}],
    "ResGatedGraphConv": [{"act": torch.nn.Tanh()}, {"root_weight": False}],
    "SuperGATConv": [{"attention_type": "SD"}, {"concat": False}],
    "RGCNConv": [{"num_bases": 2}, {"num_blocks": 2}, {"root_weight": False}, {"width": 1}],
}  # fmt: skip


def list_cases():
    for name in LAYERS:
        has_loops = name.startswith(("GCN", "GAT", "SuperGAT"))
        several = [{"aggr": aggr} for aggr in AGGREGATIONS]
        several = [{**a, **b} for a, b in itertools.product(several, OWN_EDGES if has_loops else [{}])]
        several += [
            {"flow": "target_to_source"},
            {"decomposed_layers": 2},
            *([] if name.startswith(("GIN", "Edge", "FiLM")) else [{"bias": False}]),
        ]
        for options in [*several, *MORE.get(name, [])]:
            yield pytest.param(name, options, id=f"{name} {options}")


def make_call(name, options, device):
    """Return a layer, and the arguments of its call."""
    torch.manual_seed(0)
    make, names = LAYERS[name]
    layer, batch = make(**options).to(device), Batch(device, loops=False)
    batch.edge_type = torch.arange(sum(EDGES), device=device) % 3
    width = max(options.get("width", WIDTH), 0) or WIDTH
    x = torch.randn(batch.num_nodes, width, device=device)
    return layer, (x, batch.edge_index, *(getattr(batch, each) for each in names))


@pytest.fixture(autouse=True)
def _few_edges(monkeypatch):
    """A CPU looks at layers of as few edges as these, too."""
    monkeypatch.setattr(any_convolution, "_FEW_EDGES", 0)


def is_left_to_pyg(layer, args):
    """Return its result, and True if PyG's reductions made it."""
    asked, ours, plain = [], [], Aggregation.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Aggregation, "__call__", lambda *args, **kwargs: asked.append(1) or plain(*args, **kwargs))
        # An aggregation of GENConv, which sums in torch on a CPU; others take the softmax of a number of each edge.
        steps = [any_convolution._Reduce, *([any_convolution._Softmax] if isinstance(layer, convs.GENConv) else [])]
        for step in steps:
            note_forward(patch, step, lambda *args: ours.append(1))
        made = layer(*args)
    return made, bool(asked) and not ours


@pytest.mark.parametrize(("name", "options"), [*list_cases()])
def test_what_is_claimed_is_what_is_served(device, name, options):
    plain, args = make_call(name, options, device)
    try:
        expected = plain(*args)
    except (RuntimeError, AttributeError) as error:
        expected = type(error)
    layer, args = make_call(name, options, device)

    claimed = accelerate(layer).convolutions

    if isinstance(expected, type):
        with pytest.raises(expected):
            layer(*args)
        return
    got, is_left = is_left_to_pyg(layer, args)
    assert_near([got], [expected])
    # Only a call shows that there are weights, which no maximum takes.
    is_told_late = name == "GraphConv of weights" and options.get("aggr") == "max"
    assert claimed == ({} if is_left and not is_told_late else {"": type(layer).__name__})


class Forward(convs.SAGEConv):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).relu()


class Message(convs.SAGEConv):
    def message(self, x_j):
        return 2 * x_j


class Update(convs.GraphConv):
    def update(self, inputs):
        return 2 * inputs


class Aggregate(convs.GINConv):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return 2 * super().aggregate(inputs, index, ptr, dim_size)


class EdgeUpdate(convs.GATConv):
    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
        return 2 * super().edge_update(alpha_j, alpha_i, edge_attr, index, ptr, dim_size)


class GcnForward(convs.GCNConv):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).relu()


class GatForward(convs.GATConv):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).relu()


class RelationalForward(convs.RGCNConv):
    def forward(self, x, edge_index, edge_type=None):
        return super().forward(x, edge_index, edge_type).relu()


SUBCLASSES = {
    Forward: (WIDTH, OUT), Message: (WIDTH, OUT), Update: (WIDTH, OUT), Aggregate: (make_network(),),
    EdgeUpdate: (WIDTH, OUT), GcnForward: (WIDTH, OUT), GatForward: (WIDTH, OUT), RelationalForward: (WIDTH, OUT, 3),
}  # fmt: skip


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_subclasses_are_claimed_where_they_are_served(device, kind):
    batch, layer = Batch(device, loops=False), kind(*SUBCLASSES[kind]).to(device)
    args = torch.randn(batch.num_nodes, WIDTH, device=device), batch.edge_index
    args += (torch.arange(sum(EDGES), device=device) % 3,) if kind is RelationalForward else ()
    expected = layer(*args)

    claimed = accelerate(layer).convolutions

    got, is_left = is_left_to_pyg(layer, args)
    assert_near([got], [expected])
    assert claimed == ({} if is_left else {"": kind.__name__})
    # Sums and means of a program's own messages gain no time on a CPU.
    assert is_left == (kind not in ((Forward, Message, Update, Aggregate) if runs_on_gpu(args[0]) else (Forward,)))


def test_the_claim_follows_what_changes(device):
    batch, layer = Batch(device), convs.SAGEConv(WIDTH, OUT).to(device)
    x, accelerated = torch.randn(batch.num_nodes, WIDTH, device=device), accelerate(layer)
    seen = []

    def note():
        _, is_left = is_left_to_pyg(layer, (x, batch.edge_index))
        seen.append((not is_left, "SAGEConv" in repr(accelerated)))

    note()
    hook = layer.register_message_forward_hook(lambda *args: None)
    note()
    hook.remove()
    note()
    layer.flow = "target_to_source"
    note()
    layer.flow = "source_to_target"
    layer.aggr_module = convs.SAGEConv(WIDTH, OUT, aggr="std").aggr_module
    note()

    # A deviation that was put there after is PyG's.
    assert [both[0] for both in seen] == [True, False, True, False, False]
    assert all(served == claimed for served, claimed in seen)
    accelerated.undo()
    assert accelerated.convolutions == {}


def test_layers_of_types_are_claimed_where_they_are_served(device):
    kind, edges = ("a", "to", "a"), Batch(device).edge_index
    metadata = (["a"], [kind])
    for options, expected in (({}, {"": "HGTConv"}), ({"flow": "target_to_source"}, {})):
        layer = convs.HGTConv(WIDTH, OUT, metadata, heads=2, **options).to(device)
        given = {"a": torch.randn(sum(NODES), WIDTH, device=device)}, {kind: edges}
        plain = layer(*given)["a"]

        claimed = accelerate(layer).convolutions

        got, is_left = is_left_to_pyg(layer, given)
        assert_near([got["a"]], [plain])
        assert claimed == expected == ({} if is_left else {"": "HGTConv"})


def test_nodes_along_another_dimension_are_left_to_pyg(device):
    edge_index = Batch(device).edge_index
    layer = convs.SAGEConv(sum(NODES), OUT, node_dim=-1, root_weight=False).to(device)
    register_sorted(edge_index, NODES, EDGES)
    x = torch.randn(sum(NODES), sum(NODES), device=device)
    expected = layer(x, edge_index)

    claimed = accelerate(layer).convolutions

    assert_near([layer(x, edge_index)], [expected])
    assert claimed == {}


def test_a_reduction_that_a_program_puts_on_a_layer_is_called(device):
    batch, layer = Batch(device), convs.SAGEConv(WIDTH, OUT).to(device)
    x, plain = torch.randn(batch.num_nodes, WIDTH, device=device), layer.aggr_module.forward
    layer.aggr_module.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)
    expected = layer(x, batch.edge_index)

    accelerated = accelerate(layer)

    assert_near([layer(x, batch.edge_index)], [expected])
    assert accelerated.convolutions == {}


MATRICES = {
    "lin_l": lambda: convs.SAGEConv(WIDTH, OUT),
    "lin_r": lambda: convs.SAGEConv(WIDTH, OUT),
    "lin_root": lambda: convs.GraphConv(WIDTH, OUT),
    "lin": lambda: convs.GCNConv(WIDTH, OUT),
    "lin of one head": lambda: convs.GATConv(WIDTH, OUT),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_forward_that_a_program_puts_on_a_matrix_is_called(device, name):
    batch, layer = Batch(device), MATRICES[name]().to(device)
    x, matrix = torch.randn(batch.num_nodes, WIDTH, device=device), getattr(layer, name.split()[0])
    plain = matrix.forward
    matrix.forward = lambda x: 2 * plain(x)
    expected = layer(x, batch.edge_index)

    accelerate(layer)

    assert_near([layer(x, batch.edge_index)], [expected])


def test_hooks_of_matrices_of_relations_are_called(device):
    kind, edges = ("a", "to", "a"), Batch(device).edge_index
    layer = convs.HGTConv(WIDTH, OUT, (["a"], [kind]), heads=2).to(device)
    layer.k_rel.register_forward_hook(lambda module, args, out: 2 * out)
    given = {"a": torch.randn(sum(NODES), WIDTH, device=device)}, {kind: edges}
    expected = layer(*given)["a"]

    accelerate(layer)

    assert_near([layer(*given)["a"]], [expected])
