"""Path of each convolution, and its report by the handle of `accelerate`."""

import copy
import logging

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, GraphSAGE, HeteroConv, HGTConv, RGCNConv, SAGEConv

from pyg_direct import accelerate, progress
from pyg_direct.errors import ArgumentTypeError
from pyg_direct.nn import paths
from tests.nn.convolutions import CONVOLUTIONS, EDGES, NODES, OUT, WIDTH, Batch


@pytest.fixture
def said(caplog, monkeypatch):
    """Messages of the logger, each line once for a test."""
    monkeypatch.setattr(progress, "_SAID", set())
    caplog.set_level(logging.INFO, "pyg_direct")
    return caplog


def give_rows(conv, batch, device):
    width = conv.in_channels if isinstance(getattr(conv, "in_channels", None), int) else WIDTH
    return torch.randn(batch.num_nodes, width, device=device)


@pytest.mark.filterwarnings("ignore:The usage of `scatter")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_each_call_is_counted_once(device, name):
    batch, conv = Batch(device, loops=False), CONVOLUTIONS[name]().to(device)
    x, more = give_rows(conv, batch, device), [batch.edge_attr] if name == "gine" else []
    accelerated = accelerate(conv)
    served = bool(accelerated.convolutions)

    conv(x, batch.edge_index, *more)
    conv(x, batch.edge_index.clone(), *more)

    ((_, kind, by_ours, left, reason),) = accelerated.report().convolutions
    assert kind == type(conv).__name__
    assert (by_ours, sum(left.values())) == ((1, 1) if served else (0, 2))
    assert (reason is None) == served


def test_reasons_are_told(device):
    batch, conv = Batch(device), SAGEConv(WIDTH, OUT).to(device)
    x, report = torch.randn(batch.num_nodes, WIDTH, device=device), accelerate(conv).report

    conv(x, batch.edge_index.clone())
    torch.func.vmap(lambda rows: conv(rows, batch.edge_index))(x[None])
    conv.flow = "target_to_source"
    conv(x, batch.edge_index)

    assert report().convolutions[0].left == {
        paths.SMALL: 1,
        "torch transforms what is called": 1,
        "messages flow target_to_source": 1,
    }
    assert "left to PyG" in str(report())


def test_relations_that_go_together_are_counted_each():
    kinds = [("a", "to", "b"), ("b", "to", "a")]
    conv = HeteroConv({kind: SAGEConv((WIDTH, WIDTH), OUT) for kind in kinds})
    rows = {kind: torch.randn(sum(NODES), WIDTH) for kind in "ab"}
    accelerated = accelerate(conv)

    conv(rows, {kind: Batch(seed=seed).edge_index for seed, kind in enumerate(kinds)})

    assert [one.accelerated for one in accelerated.report().convolutions] == [1, 1]


def test_convolutions_over_types_are_counted():
    batch, kind = Batch(), ("a", "to", "a")
    rgcn, hgt = RGCNConv(WIDTH, OUT, 3), HGTConv(WIDTH, OUT, (["a"], [kind]))
    x, types = torch.randn(batch.num_nodes, WIDTH), torch.arange(sum(EDGES)) % 3
    accelerated = accelerate(torch.nn.ModuleList([rgcn, hgt]))

    for edge_index in (batch.edge_index, batch.edge_index.clone()):
        rgcn(x, edge_index, types)
        hgt({"a": x}, {kind: edge_index})

    found = accelerated.report().convolutions
    assert [(one.kind, one.accelerated, one.left) for one in found] == [
        ("RGCNConv", 1, {paths.UNKNOWN: 1}),
        ("HGTConv", 1, {paths.UNKNOWN: 1}),
    ]


def test_copies_begin_with_no_calls():
    batch, conv = Batch(), SAGEConv(WIDTH, OUT)
    accelerate(conv)
    conv(torch.randn(batch.num_nodes, WIDTH), batch.edge_index)

    copied = copy.deepcopy(conv)

    assert (conv._paths.accelerated, copied._paths.accelerated) == (1, 0)


def test_calls_of_a_class_are_added_up(monkeypatch):
    monkeypatch.setattr(paths, "_TOTALS", {})
    batch = Batch()
    for _ in range(3):
        conv = SAGEConv(WIDTH, OUT)
        accelerate(conv)
        conv(torch.randn(batch.num_nodes, WIDTH), batch.edge_index)
        del conv

    assert paths.list_totals()["SAGEConv"].accelerated == 3


def test_what_is_left_is_told_once_in_one_line(said):
    model = torch.nn.ModuleList(
        [SAGEConv(WIDTH, OUT, aggr="lstm"), SAGEConv(WIDTH, OUT), *(GCNConv(WIDTH, OUT, cached=True) for _ in "ab")]
    )

    accelerated = accelerate(model)
    accelerate(model)

    (line,) = said.messages
    assert line.startswith("left to PyG: SAGEConv 0 (LSTMAggregation")
    assert "2 GCNConv (" in line
    assert list(accelerated.convolutions) == ["1"]


def test_a_model_without_convolutions_is_reported():
    assert str(accelerate(torch.nn.Linear(2, 2)).report()) == "the model has no convolutions"


def test_a_report_has_numbers_by_name_and_a_table():
    model = GraphSAGE(16, 32, num_layers=2, out_channels=4)
    accelerated = accelerate(model)
    batch = Batch("cpu", loops=False)

    model(torch.randn(batch.num_nodes, 16), batch.edge_index)

    report = accelerated.report()
    assert report.to_dict() == {
        "convs.0/accelerated": 1,
        "convs.0/left": 0,
        "convs.1/accelerated": 1,
        "convs.1/left": 0,
    }
    assert "<td" in report._repr_html_()
    assert "convs.1" in report._repr_html_()


def test_the_handle_is_no_model():
    accelerated = accelerate(GraphSAGE(WIDTH, OUT, 1))

    with pytest.raises(ArgumentTypeError, match="changes the model in place: go on with `model`"):
        accelerated(torch.zeros(2, WIDTH))
    for name in ("parameters", "to", "train", "state_dict"):
        with pytest.raises(AttributeError, match=f"go on with `model`.{name}"):
            getattr(accelerated, name)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = accelerated.other
    assert not hasattr(accelerated, "forward")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: GATConv(WIDTH, OUT, edge_dim=3), paths.OWN_LOOPS),
        (lambda: SAGEConv(2, OUT), paths.NARROW),
        (lambda: SAGEConv(WIDTH, OUT, aggr="lstm"), "LSTMAggregation has no operator"),
    ],
)
def test_the_report_says_why_a_layer_is_left_as_it_is_set_up(make, reason):
    (found,) = accelerate(make()).report().convolutions

    assert found.reason == reason


def test_calls_of_a_narrow_layer_with_loops_are_left_for_its_width():
    batch, conv = Batch(), GCNConv(2, 2)
    accelerated = accelerate(conv)

    conv(torch.randn(batch.num_nodes, 2), batch.edge_index)

    assert accelerated.report().convolutions[0].left == {paths.NARROW: 1}


def test_undone_layers_are_reported_as_such():
    accelerated = accelerate(SAGEConv(WIDTH, OUT))
    accelerated.undo()

    assert accelerated.report().convolutions[0].reason == "it is not accelerated"
