"""Batches with types whose passes are replayed: results and gradients of ordinary passes."""

import copy

import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv, HGTConv, SAGEConv, to_hetero
from torch_geometric.utils import trim_to_layer

from pyg_direct import LinkNeighborLoader, NeighborLoader, accelerate
from pyg_direct.nn.replay import batch_passes, recorded_passes
from tests.hetero_data import make_hetero
from tests.nn.convolutions import assert_near
from tests.nn.replays import record_anywhere

CLASSES, WIDTH = 4, 8
pytestmark = pytest.mark.filterwarnings("ignore:.*no edges|.*isolated:UserWarning")


@pytest.fixture
def device(real_device, monkeypatch):
    record_anywhere(real_device, monkeypatch)
    monkeypatch.setattr(batch_passes, "_MARGIN", 0.5)
    return real_device


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    data = make_hetero()
    for kind in data.node_types:
        data[kind].x = torch.randn(data[kind].num_nodes, 16, dtype=torch.float64)
    return data


def make_loader(data, device, **options):
    return NeighborLoader(data, [3, 2], ("paper", torch.arange(40)), batch_size=8, seed=0, device=device,
                          shuffle=True, drop_last=True, **options)  # fmt: skip


def list_batches(data, device, epochs=8, **options):
    loader = make_loader(data, device, **options)
    return [batch for _ in range(epochs) for batch in loader]


class Layers(torch.nn.Module):
    """Two layers, which compute what the next one reads; called with dicts, and with a batch or without its counts."""

    def __init__(self, data, make):
        super().__init__()
        # Types that no edge reaches have no rows behind the first layer.
        self.layers = torch.nn.ModuleList(HeteroConv({kind: make(width) for kind in data.edge_types})
                                          for width in (16, WIDTH))  # fmt: skip
        self.last = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x, edges, nodes=None, sampled=None):
        for number, layer in enumerate(self.layers):
            if nodes is not None:
                x, edges, _ = trim_to_layer(number, nodes, sampled, x, edges)
            x = {kind: rows.relu() for kind, rows in layer(x, edges).items()}
            edges = {kind: pair for kind, pair in edges.items() if kind[0] in x and kind[-1] in x}
        return {kind: self.last(rows) for kind, rows in x.items()}


class OfBatch(Layers):
    """As R-GAT: a batch comes in, and scores of the seeds go out."""

    def forward(self, batch):
        out = super().forward(batch.x_dict, batch.edge_index_dict, batch.num_sampled_nodes_dict,
                              batch.num_sampled_edges_dict)  # fmt: skip
        return out["paper"][: batch["paper"].batch_size]


class Attends(torch.nn.Module):
    def __init__(self, data):
        super().__init__()
        self.conv = HGTConv(16, WIDTH, data.metadata(), heads=2)

    def forward(self, x, edges):
        return self.conv(x, edges)


class _Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), WIDTH), SAGEConv((-1, -1), CLASSES)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def call_dicts(model, batch):
    return model(batch.x_dict, batch.edge_index_dict)


def call_trimmed(model, batch):
    return model(batch.x_dict, batch.edge_index_dict, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict)


def call_batch(model, batch):
    return model(batch)


def sage(width):
    return SAGEConv((-1, -1), width)


def gat(width):
    return GATConv((-1, -1), width, add_self_loops=False)


def transform(data):
    ends = sorted({end for kind in data.edge_types for end in (kind[0], kind[-1])})
    return to_hetero(_Plain(), (ends, data.edge_types))


MODELS = {
    "sage, dicts": (lambda data: Layers(data, sage), call_dicts),
    "sage, trimmed": (lambda data: Layers(data, sage), call_trimmed),
    "gat, dicts": (lambda data: Layers(data, gat), call_dicts),
    "gat, a batch": (lambda data: OfBatch(data, gat), call_batch),
    "sage, a batch": (lambda data: OfBatch(data, sage), call_batch),
    "to_hetero": (transform, call_dicts),
    "hgt": (Attends, call_dicts),
}


def make_pair(make, call, data, device, batch, replay="auto"):
    """Return the model accelerated, the same replayed too, and its replay."""
    torch.manual_seed(1)
    model = make(data).double().to(device)
    with torch.no_grad():
        call(model, batch)
    ordinary = copy.deepcopy(model)
    accelerate(ordinary, replay=False)
    return ordinary, model, accelerate(model, replay=replay).replay


def find_gradients(model, call, batch):
    model.zero_grad()
    out = call(model, batch)
    parts = [out[kind] for kind in sorted(out) if out[kind] is not None] if isinstance(out, dict) else [out]
    sum(part.square().sum() for part in parts).backward()
    return [*(part.detach() for part in parts), *(torch.zeros(0) if part.grad is None else part.grad
                                                  for part in model.parameters())]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_ordinary_passes(device, data, name):
    make, call = MODELS[name]
    batches = list_batches(data, device)
    ordinary, model, replay = make_pair(make, call, data, device, batches[0])

    for batch in batches:
        assert_near(find_gradients(model, call, batch), find_gradients(ordinary, call, batch))

    assert replay.reason is None
    assert replay.replayed >= 12
    assert len({tuple(batch.num_sampled_nodes_dict["author"]) for batch in batches}) > 1


def test_types_that_no_result_depends_on_are_left_out(device, data, monkeypatch):
    made, plain = [], recorded_passes.RecordedPasses._find_rows

    def note(self, model):
        made.append(plain(self, model))
        return made[-1]

    monkeypatch.setattr(recorded_passes.RecordedPasses, "_find_rows", note)
    make, call = MODELS["gat, a batch"]
    batches = list_batches(data, device)
    _, model, replay = make_pair(make, call, data, device, batches[0])

    for batch in batches:
        find_gradients(model, call, batch)

    assert replay.replayed >= 12
    assert made
    assert all(rows is not None for rows in made)


@pytest.mark.parametrize("name", ["sage, trimmed", "gat, a batch"])
def test_a_loop_trains_as_before(device, data, name):
    make, call = MODELS[name]
    batches = list_batches(data, device)
    ordinary, model, replay = make_pair(make, call, data, device, batches[0])
    losses = []
    for trained in (ordinary, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3, momentum=0.5)
        losses.append([])
        for batch in batches:
            found = find_gradients(trained, call, batch)
            losses[-1].append(float(found[0].square().sum()))
            optimizer.step()

    assert replay.replayed >= 12
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-4)
    assert losses[1][-1] < losses[1][0]


def test_evaluation_is_replayed(device, data):
    make, call = MODELS["sage, trimmed"]
    batches = list_batches(data, device)
    ordinary, model, replay = make_pair(make, call, data, device, batches[0])
    for part in (ordinary, model):
        part.eval()

    with torch.no_grad():
        for batch in batches:
            found, expected = call(model, batch), call(ordinary, batch)
            assert list(found) == list(expected)
            assert_near(list(found.values()), list(expected.values()))

    assert replay.replayed >= 12


def test_rows_of_8_bits_are_replayed_under_autocast(device, data):
    data = data.clone()
    for kind in data.node_types:
        data[kind].x = data[kind].x.to(torch.float8_e4m3fn)
    batches = list_batches(data, device)
    torch.manual_seed(1)
    model = OfBatch(data, gat).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        model(batches[0])
    ordinary = copy.deepcopy(model)
    accelerate(ordinary, replay=False)
    replay = accelerate(model, replay="auto").replay

    for batch in batches:
        found = []
        for trained in (model, ordinary):
            with torch.autocast(device.type, torch.bfloat16):
                found.append(find_gradients(trained, call_batch, batch))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=3e-2, atol=3e-2 * float(other.abs().max() + 1)
                                       if other.numel() else 0)  # fmt: skip

    assert replay.reason is None
    assert replay.replayed >= 12


def test_a_pass_goes_back_twice(device, data):
    make, call = MODELS["gat, a batch"]
    batches = list_batches(data, device)
    ordinary, model, replay = make_pair(make, call, data, device, batches[0])
    for batch in batches[:-1]:
        find_gradients(model, call, batch)
    assert replay.replayed > 0
    before = replay.replayed

    gradients = []
    for trained in (ordinary, model):
        trained.zero_grad()
        loss = call(trained, batches[-1]).square().sum()
        loss.backward(retain_graph=True)
        find_gradients(copy.deepcopy(ordinary), call, batches[0])
        loss.backward()
        gradients.append([part.grad for part in trained.parameters() if part.grad is not None])

    assert replay.replayed == before + 1
    assert_near(*gradients)


def test_the_last_batch_of_an_epoch_is_served_in_either_way(device, data):
    make, call = MODELS["gat, a batch"]
    loader = NeighborLoader(data, [3, 2], ("paper", torch.arange(38)), batch_size=4, seed=0, device=device)
    batches = [batch for _ in range(4) for batch in loader]
    ordinary, model, replay = make_pair(make, call, data, device, batches[0])

    for batch in batches:
        found, expected = find_gradients(model, call, batch), find_gradients(ordinary, call, batch)
        assert len(found[0]) == batch["paper"].batch_size
        assert_near(found, expected)

    assert replay.replayed >= 12


class OfSeeds(OfBatch):
    def forward(self, batch):
        return super().forward(batch) + batch["paper"].input_id.unsqueeze(1)


def test_rows_of_the_seeds_are_given_as_they_are(device, data):
    # As a program moves what the loader leaves on the host.
    batches = [batch.to(device) for batch in list_batches(data, device)]
    ordinary, model, replay = make_pair(lambda data: OfSeeds(data, sage), call_batch, data, device, batches[0])

    for batch in batches:
        assert_near(find_gradients(model, call_batch, batch), find_gradients(ordinary, call_batch, batch))

    assert replay.replayed >= 12


class Mean(Layers):
    def forward(self, x, edges):
        out = super().forward(x, edges)
        return {kind: rows - rows.mean() for kind, rows in out.items()}


class Attribute(OfBatch):
    def forward(self, batch):
        return super().forward(batch) + batch["paper"].limits.sum()


class Pooled(Layers):
    def forward(self, x, edges):
        return {kind: rows.sum(0) for kind, rows in super().forward(x, edges).items()}


@pytest.mark.parametrize(("kind", "call", "reason"), [
    (Mean, call_dicts, "rows of nodes depend on nodes that are not their neighbors"),
    (Attribute, call_batch, "limits"),
    (Pooled, call_dicts, "the model gives 4 rows, which are not those of the nodes of a type in some hops"),
])  # fmt: skip
def test_models_that_read_other_values_are_refused(device, data, kind, call, reason):
    batches = list_batches(data, device, 4)
    for batch in batches:
        batch["paper"].limits = torch.ones(3, dtype=torch.float64, device=device)
    ordinary, model, replay = make_pair(lambda data: kind(data, sage), call, data, device, batches[0])

    for batch in batches:
        assert_near(find_gradients(model, call, batch), find_gradients(ordinary, call, batch))

    assert replay.replayed == 0
    assert reason in replay.reason


def test_batches_around_links_are_replayed_by_dicts(device, data):
    make, call = MODELS["sage, dicts"]
    kind = ("author", "writes", "paper")
    loader = LinkNeighborLoader(data, [3, 2], edge_label_index=(kind, data[kind].edge_index[:, :48]), batch_size=8,
                                seed=0, device=device, shuffle=True)  # fmt: skip
    batches = [batch for _ in range(8) for batch in loader]
    ordinary, model, replay = make_pair(make, call, data, device, batches[0])

    for batch in batches:
        assert_near(find_gradients(model, call, batch), find_gradients(ordinary, call, batch))

    assert replay.reason is None
    assert replay.replayed >= 8


def test_edges_that_a_program_changed_are_left_to_ordinary_passes(device, data):
    make, call = MODELS["sage, dicts"]
    batches = list_batches(data, device)
    ordinary, model, replay = make_pair(make, call, data, device, batches[0])
    for batch in batches[:20]:
        find_gradients(model, call, batch)
    before = replay.replayed
    batch: HeteroData = batches[20]
    for store in batch.edge_stores:
        store.edge_index = store.edge_index.flip(1)

    assert_near(find_gradients(model, call, batch), find_gradients(ordinary, call, batch))
    assert replay.replayed == before > 0


class TwoPairs(Layers):
    """Edges come in twice, and the second ones count."""

    def forward(self, x, edges, others):
        return super().forward(x, others)


def test_other_edges_of_a_relation_are_left_to_ordinary_passes(device, data):
    batches = list_batches(data, device)

    def call(model, batch):
        first, *_ = batch.edge_index_dict
        others = {kind: pair[:, : pair.shape[1] // 2] if kind == first else pair
                  for kind, pair in batch.edge_index_dict.items()}  # fmt: skip
        return model(batch.x_dict, batch.edge_index_dict, others)

    ordinary, model, replay = make_pair(lambda data: TwoPairs(data, sage), call, data, device, batches[0])

    for batch in batches[:14]:
        assert_near(find_gradients(model, call, batch), find_gradients(ordinary, call, batch))

    assert replay.replayed == 0


def test_batches_with_fewer_first_nodes_than_seeds_are_left_to_ordinary_passes(device, data):
    make, call = MODELS["gat, a batch"]
    batches = list_batches(data, device)
    ordinary, model, replay = make_pair(make, call, data, device, batches[0])
    for batch in batches[:20]:
        find_gradients(model, call, batch)
    before = replay.replayed
    for batch in batches[20:24]:
        # As of seeds that come twice.
        batch["paper"].batch_size += 1
        assert_near(find_gradients(model, call, batch), find_gradients(ordinary, call, batch))

    assert replay.replayed == before > 0


class OfLists(Layers):
    """Rows of a type come as several tensors."""

    def forward(self, parts, edges):
        return super().forward({kind: torch.cat(rows, 1) for kind, rows in parts.items()}, edges)


def test_lists_of_tensors_are_read(data, device):
    model = OfLists(data, sage).double().to(device)
    accelerate(model, replay="auto")
    edges_only = Layers(data, sage).double().to(device)

    for batch in list_batches(data, device, epochs=4):
        made = model({kind: [rows[:, :4], rows[:, 4:]] for kind, rows in batch.x_dict.items()}, batch.edge_index_dict)
        edges_only.load_state_dict(model.state_dict())
        expected = call_dicts(edges_only, batch)
        torch.testing.assert_close(made["paper"], expected["paper"])
