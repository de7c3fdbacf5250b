"""Rows of layers that no later layer reads: recorded passes leave them out, and results and gradients stay."""

import copy
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import GATConv, GATv2Conv, HeteroConv, SAGEConv
from torch_geometric.utils import trim_to_layer

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.datasets.igbh import synthetic_igbh
from pyg_direct.nn.hetero import unread_rows
from pyg_direct.nn.hetero.unread_rows import RowsOfPass
from tests.nn.tape import record_on_tapes

WIDTH, HIDDEN, CLASSES, SIZE = 6, 8, 5, 16


@pytest.fixture(scope="module")
def graph():
    return synthetic_igbh(3e-6, num_features=WIDTH, num_classes=CLASSES, dtype=torch.float32)


@pytest.fixture
def tapes(monkeypatch):
    """Tapes of all recordings, made without a GPU."""
    found = []
    record_on_tapes(monkeypatch, lambda work, made: found.append(made))
    return found


class Trimmed(torch.nn.Module):
    """Three layers over a sampled batch, each of which computes what the next one reads."""

    def __init__(self, data, make, use=None, aggr="sum"):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            HeteroConv({kind: make((width, width)) for kind in data.edge_types}, aggr)
            for width in (WIDTH, HIDDEN, HIDDEN)
        )
        self.last, self.use = torch.nn.Linear(HIDDEN, CLASSES), use
        self.register_buffer("kept", torch.zeros(HIDDEN))

    def forward(self, batch):
        x, edges, seen = batch.x_dict, batch.edge_index_dict, 0
        for layer, conv in enumerate(self.convs):
            x, edges, _ = trim_to_layer(layer, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, edges)
            if self.use == "after" and layer:
                x = {kind: rows.relu() for kind, rows in x.items()}
            x = conv(x, edges)
            if self.use == "soft" and layer == 0:
                seen = x["author"].softmax(1)[0, 0] * 0
            if self.use == "before":
                x = {kind: F.leaky_relu(rows, 0.2) for kind, rows in x.items()}
            if self.use == "buffer" and layer == 0:
                self.kept.copy_(x["author"].detach().mean(0))
            if self.use == "bent":
                x = {kind: rows + rows.sin() for kind, rows in x.items()}
        return self.last(x["paper"][: batch["paper"].batch_size]) + seen


def make_gat(widths):
    return GATConv(widths, HIDDEN // 2, 2, add_self_loops=False)


def make_gat_with_residuals(widths):
    return GATConv(widths, HIDDEN // 2, 2, add_self_loops=False, residual=True)


def make_gat_v2(widths):
    return GATv2Conv(widths, HIDDEN // 2, 2, add_self_loops=False)


def make_sage(widths):
    return SAGEConv(widths, HIDDEN)


def learn(model, graph, epochs=2):
    """Return losses, gradients and results of a loop."""
    loader = NeighborLoader(graph, [3, 2, 2], ("paper", torch.arange(9 * SIZE)), batch_size=SIZE, seed=0)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(epochs):
        for batch in islice(loader, 9):
            batch = batch.apply(lambda part: part.double() if part.is_floating_point() else part)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), batch["paper"].y[:SIZE])
            loss.backward()
            seen += [loss.detach(), *(part.grad for part in model.parameters())]
            optimizer.step()
    return seen


def compare(model, graph):
    """Train a model, and a copy with PyG's kernels; return what the recorded step knows of rows."""
    model = model.double()
    plain = copy.deepcopy(model)
    replay = accelerate(model, replay=True).replay
    for found, expected in zip(learn(model, graph), learn(plain, graph), strict=True):
        # Parameters of unused relations have no gradient.
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert replay.replayed == 9
    return replay._passes[True, True][0].recording._rows


def list_zero_filled(tapes):
    """List the rows of gradients that take zeros for rows beyond those with a gradient."""
    return [call[1][1][0] for tape in tapes for call in tape.calls if call[0] is torch.ops.aten.slice_backward.default]


@pytest.mark.parametrize(("make", "use", "aggr"), [
    (make_gat, None, "sum"), (make_gat, "before", "sum"), (make_gat_with_residuals, "after", "mean"),
    (make_gat_v2, "before", "mean"), (make_sage, "before", "sum"), (make_sage, "after", "mean")])  # fmt: skip
def test_rows_that_the_next_layer_trims_are_not_computed(graph, tapes, make, use, aggr, monkeypatch):
    monkeypatch.setattr("pyg_direct.nn.conv.sage.wins_on_cpu", lambda x: True)
    torch.manual_seed(0)

    rows = compare(Trimmed(graph, make, use, aggr), graph)

    found = [{kind for kind in ("paper", "author") if kind in rows._num_read[layer]} for layer in range(3)]
    assert found == [{"paper", "author"}, {"paper", "author"}, {"paper"}]
    assert not {rows._shapes[0, kind][0] for kind in ("paper", "author")} & {*list_zero_filled(tapes)}


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("use", ["soft", "bent"])
def test_rows_that_are_read_in_any_way_are_computed(graph, use):
    torch.manual_seed(0)

    rows = compare(Trimmed(graph, make_gat, use), graph)

    read = {} if rows is None else rows._num_read.get(0, {})
    assert "author" not in read
    assert ("paper" in read) == (use == "soft")


@pytest.mark.usefixtures("tapes")
def test_buffers_that_padding_would_reach_are_written_by_ordinary_passes(graph):
    torch.manual_seed(0)
    model = Trimmed(graph, make_gat, "buffer").double()
    plain = copy.deepcopy(model)
    replay = accelerate(model, replay="auto").replay

    learn(model, graph)
    learn(plain, graph)

    torch.testing.assert_close(model.kept, plain.kept, rtol=1e-9, atol=1e-11)
    assert replay.replayed == 0
    assert "a buffer of the model depends on all rows of a batch" in str(replay.reason)


@pytest.mark.usefixtures("tapes")
def test_types_are_left_out_where_rows_cannot_be(graph, monkeypatch):
    plain = RowsOfPass.find_unread

    def find(self, results):
        found = plain(self, results)
        # As for rows that a program's own kernel reads.
        self._num_read[0]["paper"] = 1
        self._shapes[0, "paper"] = torch.Size([9999, HIDDEN])
        return found

    monkeypatch.setattr(RowsOfPass, "find_unread", find)
    torch.manual_seed(0)
    rows = compare(Trimmed(graph, make_gat), graph)

    assert rows._num_read == {}
    assert rows._unused


def follow(read):
    """Return how many of ten rows a pass is found to read, None for all, and whether any."""
    rows = RowsOfPass()
    with rows.follow():
        call = rows.begin_call()
        out = rows.end_call(call, {"a": torch.arange(30.0).view(10, 3)})["a"]
        result = read(out)
    rows.find_unread([] if result is None else [result])
    return 0 if rows._unused else rows._num_read.get(0, {}).get("a")


@pytest.mark.parametrize(("read", "count"), [
    (lambda x: x.narrow(0, 0, 4).exp(), 4), (lambda x: x[:4], 4), (lambda x: x[2:4] + x[:2], 4),
    (lambda x: x[6].sum(), 7),
    (lambda x: x.relu()[:5].sigmoid().narrow(0, 0, 2) * 2, 2), (lambda x: x.view(-1)[:7].sum(), 3),
    (lambda x: x[:4].relu_(), 4), (lambda x: x.relu_()[:4], None), (lambda x: x.mean(0), None), (lambda x: x, None),
    (lambda x: x.t()[:, :4].sum(), 4), (lambda x: x.softmax(0)[:4], None), (lambda x: x[-1:].sum(), None),
    (lambda x: x.new_zeros(x.shape).copy_(x)[:2], None),
    (lambda x: x.index_select(0, torch.arange(2)), None), (lambda x: torch.cat([x[:2], x[:4]]), 4)])  # fmt: skip
def test_rows_that_operators_read_are_counted(read, count):
    assert follow(read) == count


@pytest.mark.parametrize("take", [
    lambda x: x.narrow(0, 0, 3), lambda x: x[:3], lambda x: torch.narrow(x, dim=0, start=0, length=2),
    lambda x: x[0:2:1], lambda x: x.relu()[:3], lambda x: F.leaky_relu(x, 0.1).tanh().narrow(dim=0, start=0, length=1),
    lambda x: x.to(torch.float64)[:-7], lambda x: x[:0]])  # fmt: skip
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_tensor_that_stands_for_rows_gives_those_that_it_holds(take, value):
    full = torch.randn(10, 4).requires_grad_()
    expected = take(full)
    (to_full,) = torch.autograd.grad(expected.square().sum(), full)
    rows = RowsOfPass()
    rows._num_read, rows._shapes = {0: {"a": 3}}, {(0, "a"): full.shape}

    with rows.leave_out(value):
        call = rows.begin_call()
        held = full.detach()[: call.num_read["a"]].requires_grad_()
        out = rows.end_call(call, {"a": held.clone()})["a"]
        got = take(out)
    (to_held,) = torch.autograd.grad(got.square().sum(), held)

    assert out.shape == full.shape
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(to_held, to_full[:3], rtol=0, atol=0)


@pytest.mark.parametrize(
    "take", [lambda x: x[:5], lambda x: x.sum(0), lambda x: x[1:3], lambda x: x + x, lambda x: x[::2]]
)
def test_rows_that_are_not_held_are_the_number_that_shows_them(take):
    rows = RowsOfPass()
    rows._num_read, rows._shapes = {0: {"a": 3}}, {(0, "a"): torch.Size([10, 4])}

    with rows.leave_out(float("nan")):
        out = rows.end_call(rows.begin_call(), {"a": torch.randn(3, 4, requires_grad=True)})["a"]
        got = take(out)

    assert bool(got.isnan().any())
    assert torch.autograd.grad(got.sum(), out, allow_unused=True)[0] is not None


def read_by_layer(rows, given, may_relu=True, **options):
    """Run a layer whose results are twice its rows; return them."""
    call = rows.begin_call([given], **options)
    has_relu = rows.note_products(may_relu=may_relu)
    out = given * 2
    return rows.end_call(call, {"a": out.relu().bfloat16() if has_relu else out})["a"], has_relu


@pytest.mark.parametrize(("read", "is_found"), [
    (lambda x: x.relu(), True), (lambda x: F.relu(x[:3]), True), (lambda x: torch.relu(x).narrow(0, 0, 2), True),
    (lambda x: x.relu() if x.shape[0] == 5 and len(x) == 5 and x.dim() == 2 else None, True),
    (lambda x: x, False), (lambda x: x.relu().relu(), False), (lambda x: x.relu() + x, False),
    (lambda x: [x.exp(), x.relu()][1], False), (lambda x: x.tanh(), False), (lambda x: x[1:].relu(), False),
    (lambda x: [part := x.relu(), torch.cat([part, part])][0], False)])  # fmt: skip
def test_layers_pass_a_relu_if_the_next_layer_alone_reads_it(read, is_found, monkeypatch):
    monkeypatch.setattr(unread_rows, "_is_product", lambda node: type(node).__name__ == "MulBackward0")
    rows, x = RowsOfPass(), torch.randn(5, 4).requires_grad_()

    def run():
        with rows.leave_out(float("nan")):
            first, has_relu = read_by_layer(rows, x, changes=False)
            given = read(first)
            out, _ = read_by_layer(rows, given)
            return given, out, has_relu

    given, out, has_relu = run()
    assert not has_relu
    assert rows.find_relus([out]) == is_found
    if not is_found:
        return
    again, twice, has_relu = run()

    assert has_relu
    assert again.dtype == torch.bfloat16
    torch.testing.assert_close(again, given.bfloat16(), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(torch.autograd.grad(twice.sum(), x)[0], grad, rtol=1e-2, atol=0)
    rows.forget_relus()
    assert not run()[2]


@pytest.mark.parametrize("options", [{"may_relu": False}, {"changes": True}, {"is_result": True}])
def test_layers_pass_no_relu_if_they_change_sums_or_the_rows_are_a_result(options, monkeypatch):
    monkeypatch.setattr(unread_rows, "_is_product", lambda node: True)
    rows, is_result = RowsOfPass(), options.pop("is_result", False)
    with rows.leave_out():
        first, _ = read_by_layer(rows, torch.randn(5, 4).requires_grad_(), **{"changes": False, **options})
        given = first.relu()
        out, _ = read_by_layer(rows, given)

    assert not rows.find_relus([out, given] if is_result else [out])
