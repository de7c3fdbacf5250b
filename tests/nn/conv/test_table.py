"""A convolution is a file and a line in the table: no other file names it."""

import copy
import io

import pytest
import torch
from torch_geometric.nn import GATConv, LEConv, MessagePassing, SAGEConv

from pyg_direct import accelerate
from pyg_direct.nn.conv import table
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.dispatch import copy_rows, propagate
from tests.nn.convolutions import OUT, WIDTH, Batch, assert_near, run


class Plain(MessagePassing):
    def __init__(self):
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(WIDTH, OUT)

    def forward(self, x, edge_index):
        return self.lin(self.propagate(edge_index, x=x))


def test_a_line_in_the_table_accelerates_a_convolution(monkeypatch, calls):
    monkeypatch.setattr(table, "SPECS", (*table.SPECS, ConvSpec(Plain, propagate=propagate, message=copy_rows)))
    batch, conv = Batch(), Plain()
    x = torch.randn(batch.num_nodes, WIDTH)
    expected = run(conv, x, batch.edge_index)

    accelerated = accelerate(conv)

    assert_near(run(conv, x, batch.edge_index), expected)
    assert calls == ["sum"]
    assert accelerated.convolutions == {"": "Plain"}


@pytest.mark.parametrize("spec", table.SPECS, ids=lambda spec: spec.kind.__name__)
def test_each_line_finds_its_class_and_those_derived_from_it(spec):
    derived = type("Derived", (spec.kind,), {})

    assert table.find_spec(spec.kind) is table.find_spec(derived) is spec
    assert spec.is_own(derived)
    assert copy.deepcopy(spec) is spec


def test_other_classes_have_none():
    assert table.find_spec(LEConv) is None


def test_pickles_hold_no_spec():
    conv, file = SAGEConv(WIDTH, OUT), io.BytesIO()
    accelerate(conv)

    torch.save(conv, file)

    file.seek(0)
    assert "_spec" not in torch.load(file, weights_only=False).__dict__
    assert copy.deepcopy(conv)._spec is conv._spec


def test_a_class_that_was_given_other_steps_is_not_its_own(monkeypatch):
    spec = table.find_spec(GATConv)
    monkeypatch.setattr(GATConv, "message", lambda self, x_j: x_j)

    assert not spec.is_own(GATConv)
