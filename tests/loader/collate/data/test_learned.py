"""Rows that are learned and that no attribute of a graph shows: of stores, sparse tensors, and a program's own code."""

import copy
import time

import pytest
import torch
from torch.nn import Parameter
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader as PygNodeLoader
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from pyg_direct import FeatureStore, HGTLoader, LinkNeighborLoader, NeighborLoader, NodeLoader, Producers
from pyg_direct.errors import ArgumentError
from pyg_direct.loader import NeighborSampler as LayerLoader
from pyg_direct.sampler import NeighborSampler
from tests.batches import make_data
from tests.hetero_data import make_hetero
from tests.loader.collate.data.test_stores import WRITES, store_graph

SEEDS = torch.arange(60)
OPTIONS = {"batch_size": 10, "seed": 3}
PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class CountingStore(MyFeatureStore):
    """Counts the batches whose rows were asked for."""

    num_reads = 0

    def multi_get_tensor(self, *args, **kwargs):
        self.num_reads += 1
        return super().multi_get_tensor(*args, **kwargs)


def store_plain(features, x):
    """The stores of a graph without types."""
    data, graph = make_data(), MyGraphStore()
    features.put_tensor(x, group_name=None, attr_name="x", index=None)
    graph.put_edge_index(tuple(data.edge_index), edge_type=None, layout="coo", size=(70, 70))
    return features, graph


def learn(learned, loader, find, num_epochs=2):
    """Train what is learned, and hold each batch to it as it is then.

    Args:
        learned: The tensor.
        loader: Of batches.
        find: Of a batch, (rows, their ids).
        num_epochs: How often.

    Returns:
        The losses.
    """
    optimizer, losses = torch.optim.Adam([learned], 0.1), []
    for _ in range(num_epochs):
        for batch in loader:
            rows, ids = find(batch)
            # What were made ahead would be made now.
            time.sleep(0.01)
            assert torch.equal(rows.detach().cpu(), learned.detach()[ids.to(learned.device)].cpu())
            optimizer.zero_grad()
            loss = rows.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


WAYS = {
    "nodes": lambda stores, **options: NeighborLoader(stores, [3, 2], ("paper", torch.arange(40)), **options),
    "made ahead": lambda stores, **options: NeighborLoader(stores, [3, 2], "paper", prefetch=3, **options),
    "when asked for": lambda stores, **options: NeighborLoader(stores, [3, 2], "paper", prefetch=0, **options),
    "super-batches": lambda stores, **options: NeighborLoader(stores, [3, 2], "paper", super_batch=3, **options),
    "links": lambda stores, **options: LinkNeighborLoader(stores, [3, 2], WRITES, neg_sampling="binary", **options),
    "own sampler": lambda stores, **options: NodeLoader(
        stores, NeighborSampler(stores, [3, 2], device=options["device"]), "paper", **options),
}  # fmt: skip


@PLACES
@pytest.mark.parametrize("own_store", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_rows_of_a_store_are_learned(real_device, place, own_store, name):
    data = make_hetero()
    del data["nobody"]
    learned = data["author"].x = Parameter(torch.randn(data["author"].num_nodes, 4, device=place))
    loader = WAYS[name](store_graph(data, FeatureStore(real_device) if own_store else MyFeatureStore()),
                        device=real_device, **OPTIONS)  # fmt: skip

    losses = learn(learned, loader, lambda batch: (batch["author"].x, batch["author"].n_id))

    assert losses[-1] < 0.7 * losses[0]
    batch = next(iter(loader))
    assert batch["author"].x.device.type == real_device.type
    assert not batch["paper"].x.requires_grad


@pytest.mark.parametrize("own_store", [False, True])
def test_rows_of_edges_in_a_store_are_learned(real_device, own_store):
    data = make_hetero()
    del data["nobody"]
    learned = data[WRITES].edge_attr = Parameter(torch.randn(data[WRITES].num_edges, 3))
    stores = store_graph(data, FeatureStore(real_device) if own_store else MyFeatureStore())

    losses = learn(learned, NeighborLoader(stores, [-1], "paper", device=real_device, **OPTIONS),
                   lambda batch: (batch[WRITES].edge_attr, batch[WRITES].e_id))  # fmt: skip

    assert losses[-1] < losses[0]


def test_equals_pygs_own_loader_over_a_store(real_device):
    learned = Parameter(torch.randn(70, 4))
    other, options = copy.deepcopy(learned), {"input_nodes": SEEDS, "batch_size": 20}
    stores, theirs = store_plain(MyFeatureStore(), learned), store_plain(MyFeatureStore(), other)
    loader = NeighborLoader(stores, [-1, -1], device=real_device, **options)
    theirs = PygNodeLoader(theirs, NeighborSampler(theirs, [-1, -1], device="cpu"), **options)

    losses = learn(learned, loader, lambda batch: (batch.x, batch.n_id))

    assert losses == pytest.approx(learn(other, theirs, lambda batch: (batch.x, batch.n_id)), rel=1e-5)
    torch.testing.assert_close(learned, other, rtol=1e-4, atol=1e-5)


def test_rows_of_a_store_that_are_not_learned_are_read_ahead_until_they_are(real_device):
    x = torch.randn(70, 4)
    features, graph = store_plain(CountingStore(), x)
    loader = NeighborLoader((features, graph), [3, 2], SEEDS, device=real_device, **OPTIONS)
    before, epoch = features.num_reads, iter(loader)
    next(epoch)
    end = time.monotonic() + 60
    while features.num_reads == before + 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert features.num_reads > before + 1
    assert len(list(epoch)) == 5
    assert features.num_reads == before + 6

    learned = Parameter(x)
    features.put_tensor(learned, group_name=None, attr_name="x", index=None)
    learn(learned, loader, lambda batch: (batch.x, batch.n_id))
    assert features.num_reads == before + 18


def test_a_store_of_ours_keeps_what_is_learned(real_device):
    learned, store = Parameter(torch.randn(70, 4)), FeatureStore(real_device)
    features, graph = store_plain(store, learned)

    rows = store.get_tensor(group_name=None, attr_name="x", index=torch.tensor([5, 5, 0]))
    part = store.get_tensor(group_name=None, attr_name="x", index=slice(3, 9, 2))
    (rows.sum() + part.sum()).backward()

    assert rows.device.type == real_device.type
    assert torch.equal(part.detach().cpu(), learned.detach()[3:9:2])
    assert learned.grad[:, 0].nonzero().view(-1).tolist() == [0, 3, 5, 7]
    assert learned.grad[5, 0] == 3
    assert store.get_tensor_size(group_name=None, attr_name="x") == (70, 4)
    loader = NeighborLoader((features, graph), [2], SEEDS, device=real_device)
    assert "x: in a store" in loader.report().places


class Derived(NeighborLoader):
    """Gives batches rows of a table of its own."""

    table = None

    def filter_fn(self, out):
        batch = super().filter_fn(out)
        batch.own = self.table[batch.n_id.to(self.table.device)]
        return batch


def test_what_a_derived_class_reads_is_learned(real_device):
    loader = Derived(make_data(), [3, 2], SEEDS, device=real_device, prefetch=2, **OPTIONS)
    loader.table = Parameter(torch.randn(70, 4))

    losses = learn(loader.table, loader, lambda batch: (batch.own, batch.n_id))

    assert losses[-1] < 0.7 * losses[0]


def test_what_the_transform_of_layers_reads_is_learned(real_device):
    table = Parameter(torch.randn(70, 4))

    def add_rows(batch_size, n_id, adjs):
        return {"rows": [table[n_id.to(table.device)]], "n_id": n_id, "adjs": (batch_size, adjs)}

    loader = LayerLoader(make_data().edge_index, [3, 2], SEEDS, transform=add_rows, device=real_device, prefetch=2,
                         **OPTIONS)  # fmt: skip

    losses = learn(table, loader, lambda batch: (batch["rows"][0], batch["n_id"]))

    assert losses[-1] < 0.7 * losses[0]


def find_values(batch):
    """Values of a batch's adjacency and the edges that they are of, in one order."""
    adj_t = batch.adj_t
    if isinstance(adj_t, torch.Tensor):
        targets = torch.arange(batch.num_nodes, device=adj_t.device).repeat_interleave(adj_t.crow_indices().diff())
        ends, values = (targets, adj_t.col_indices()), adj_t.values()
    else:
        *ends, values = adj_t.coo()
    nodes = 70 * batch.n_id[ends[0]] + batch.n_id[ends[1]]
    return values, nodes


def make_adjacency(kind):
    """An adjacency without parallel edges, its values, and where each edge's is."""
    keys = torch.unique(make_data().edge_index[1] * 70 + make_data().edge_index[0])
    values, places = torch.randn(keys.numel()).requires_grad_(), torch.full((4900,), -1)
    places[keys] = torch.arange(keys.numel())
    if kind == "torch_sparse":
        from torch_sparse import SparseTensor

        return SparseTensor(row=keys // 70, col=keys % 70, value=values, sparse_sizes=(70, 70)), values, places
    pointer = torch.bincount(keys // 70, minlength=70).cumsum(0)
    pointer = torch.cat([pointer.new_zeros(1), pointer])
    return torch.sparse_csr_tensor(pointer, keys % 70, values.detach(), (70, 70)).requires_grad_(), None, places


@pytest.mark.parametrize("kind", [pytest.param("torch_sparse", marks=pytest.mark.sparse), "torch"])
def test_values_of_a_sparse_adjacency_are_learned(real_device, kind):
    adj_t, values, places = make_adjacency(kind)
    loader = NeighborLoader(Data(adj_t=adj_t, num_nodes=70), [-1, -1], SEEDS, device=real_device, prefetch=2, **OPTIONS)

    for batch in loader:
        own, keys = find_values(batch)
        time.sleep(0.01)
        now = adj_t.detach().values() if values is None else values.detach()
        assert torch.equal(own.detach().cpu(), now[places[keys.cpu()]])
        own.sum().backward()
        grad = adj_t.grad.values() if values is None else values.grad
        assert int(grad.count_nonzero()) > 0
        with torch.no_grad():
            # As an optimizer writes to them.
            (adj_t.values() if values is None else values).add_(1)


@pytest.mark.usefixtures("quick_starts")
def test_rows_of_a_store_that_are_learned_do_not_come_from_other_processes():
    loader = NeighborLoader(store_plain(MyFeatureStore(), Parameter(torch.randn(70, 4))), [2], SEEDS, device="cpu")
    producers = Producers(loader, device="cpu")

    with pytest.raises(ArgumentError, match=r"loader must be one whose rows .* got rows of a batch that requires one"):
        next(iter(producers))
    producers.close()


def test_rows_of_a_type_are_learned_by_other_samplers_over_edges(real_device):
    data = make_hetero()
    learned = data[WRITES].weighty = Parameter(torch.randn(data[WRITES].num_edges))
    loader = HGTLoader(data, [8, 8], ("paper", torch.arange(40)), device=real_device, prefetch=2, **OPTIONS)

    losses = learn(learned, loader, lambda batch: (batch[WRITES].weighty, batch[WRITES].e_id))

    assert losses[-1] < losses[0]
