"""Loaders that a program derives from PyG's have samplers of ours, and rows that our loaders gather."""

import pytest
import torch
import torch_geometric
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader
from torch_geometric.sampler import NeighborSampler, NodeSamplerInput

import pyg_direct
from pyg_direct.noedit import program_record
from pyg_direct.noedit.replaced_class import Filters
from tests.graphs import make_random_graph

GRAPH = make_random_graph(70, 600)
SEEDS = torch.arange(20)


def make_data():
    return Data(x=torch.randn(70, 3), y=torch.arange(70), edge_attr=torch.randn(600, 2), edge_index=GRAPH.edge_index)


def make_typed():
    data = HeteroData()
    data["a"].x, data["b"].x, data["a"].time = torch.randn(70, 3), torch.randn(70, 5), torch.arange(70)
    data["b"].time = torch.arange(70)
    data["a", "to", "b"].edge_index = data["b", "back", "a"].edge_index = GRAPH.edge_index
    data["a", "to", "b"].edge_attr = torch.randn(600, 2)
    return data


class Kept(NeighborLoader):
    """A class that keeps all methods of PyG's."""


class Calling(NeighborLoader):
    """A class whose `filter_fn` adds to PyG's batch."""

    def filter_fn(self, out):
        batch = super().filter_fn(out)
        batch.num_found = out.node.numel()
        return batch


class Links(LinkNeighborLoader):
    """A class of links."""


class Neighbors(NodeLoader):
    """A loader of which only the parts are used, as in RelBench."""

    def find(self, nodes, time):
        given = NodeSamplerInput(input_id=nodes, node=nodes, time=time, input_type=self.input_nodes)
        return self.filter_fn(self.node_sampler.sample_from_nodes(given))


class Pairs(torch.utils.data.DataLoader):
    """Batches of two subgraphs each, made by two loaders over one sampler, as in RelBench."""

    def __init__(self, data, num_neighbors, **kwargs):
        sampler = NeighborSampler(data, num_neighbors, disjoint=True, time_attr="time",
                                  share_memory=kwargs.get("num_workers", 0) > 0)  # fmt: skip
        self.sides = [Neighbors(data, sampler, kind) for kind in ("a", "b")]
        super().__init__(range(60), collate_fn=self.collate, **kwargs)

    def collate(self, index):
        nodes = torch.tensor(index)
        return [side.find(nodes, nodes + 5) for side in self.sides]


@pytest.fixture
def served(monkeypatch):
    """How many batches our loaders built while PyG's names are ours, on the CPU."""
    calls, build = [], Filters.filter
    monkeypatch.setattr(Filters, "filter", lambda self, *args: calls.append(1) or build(self, *args))
    pyg_direct.install(device="cpu")
    yield calls
    pyg_direct.uninstall()


def assert_rows(batch, data):
    assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal(batch.y, data.y[batch.n_id])
    assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
    ends = batch.n_id[batch.edge_index]
    assert torch.equal(ends, data.edge_index[:, batch.e_id])
    assert (batch.batch_size, batch.input_id.numel()) == (5, 5)


@pytest.mark.parametrize("kind", [Kept, Calling])
def test_rows_of_derived_loaders_are_gathered_by_ours(kind, served):
    data = make_data()
    loader = kind(data, [4, 3], input_nodes=SEEDS, batch_size=5, transform=lambda batch: batch.update({"seen": True}))

    batches = list(loader)

    assert type(loader) is kind
    assert isinstance(loader.node_sampler, pyg_direct.sampler.NeighborSampler)
    assert len(served) == len(batches) == 4
    for number, batch in enumerate(batches):
        assert_rows(batch, data)
        assert batch.seen
        assert torch.equal(batch.n_id[:5], SEEDS[5 * number : 5 * number + 5])
        assert kind is Kept or batch.num_found == batch.num_nodes
    assert f"rows of {kind.__name__} (" in program_record.describe_program()[0]


@pytest.mark.usefixtures("_installed")
def test_batches_are_those_that_pygs_code_builds(monkeypatch):
    data, made = make_data(), []
    for serves in (Filters.serves, lambda *_: False):
        monkeypatch.setattr(Filters, "serves", serves)
        pyg_direct.install(device="cpu", seed=4)
        made.append(list(Kept(data, [4, 3], input_nodes=SEEDS, batch_size=5)))

    for ours, theirs in zip(*made, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.to_dict().items():
            assert torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value, key


@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
def test_links_of_derived_loaders(negatives, served):
    data = make_data()
    loader = Links(data, [4], edge_label_index=GRAPH.edge_index[:, :20], batch_size=5, neg_sampling=negatives)

    for number, batch in enumerate(loader):
        links = GRAPH.edge_index[:, 5 * number : 5 * number + 5]
        assert torch.equal(batch.x, data.x[batch.n_id])
        if negatives == "triplet":
            assert torch.equal(batch.n_id[torch.stack([batch.src_index, batch.dst_pos_index])], links)
        else:
            assert torch.equal(batch.n_id[batch.edge_label_index[:, :5]], links)

    assert len(served) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_of_loaders_over_one_sampler(workers, served):
    data = make_typed()

    batches = list(Pairs(data, [4, 3], batch_size=12, num_workers=workers))

    assert len(batches) == 5
    # A worker process runs PyG's code.
    assert len(served) == (0 if workers else 10)
    for number, pair in enumerate(batches):
        for kind, batch in zip("ab", pair, strict=True):
            assert batch[kind].n_id[:12].tolist() == list(range(12 * number, 12 * number + 12))
            for other in "ab":
                assert torch.equal(batch[other].x, data[other].x[batch[other].n_id])
                assert (batch[other].time <= batch[kind].seed_time[batch[other].batch]).all()
            relation = batch["a", "to", "b"]
            assert torch.equal(relation.edge_attr, data["a", "to", "b"].edge_attr[relation.e_id])


def test_workers_leave_the_rows_to_their_parent(served):
    data = make_data()

    for batch in Kept(data, [4, 3], input_nodes=SEEDS, batch_size=5, num_workers=2, filter_per_worker=False):
        assert_rows(batch, data)

    assert len(served) == 4


@pytest.mark.usefixtures("_installed")
def test_what_a_program_writes_and_replaces_is_in_the_next_batch():
    data = make_data()
    loader = Kept(data, [4], input_nodes=SEEDS, batch_size=5)
    batches = iter(loader)
    next(batches)

    data.x.mul_(2)
    assert_rows(next(batches), data)
    data.x.numpy()[:] += 1
    assert_rows(next(batches), data)
    loader.transform = lambda batch: batch.num_nodes
    assert isinstance(next(batches), int)
    loader.transform, data.x = None, torch.randn(70, 3)
    assert_rows(next(iter(loader)), data)


@pytest.mark.usefixtures("_installed")
def test_graphs_that_ours_refuses_are_left_to_pyg(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError("this graph is not offered")

    data = make_data()
    loader = Kept(data, [4], input_nodes=SEEDS, batch_size=5)
    monkeypatch.setattr(pyg_direct.NodeLoader, "__init__", refuse)

    for batch in loader:
        assert_rows(batch, data)

    assert "rows of Kept" in program_record.describe_program()[-1]


def test_uninstalled_loaders_are_pygs():
    plain = torch_geometric.loader.NodeLoader.filter_fn.__code__
    pyg_direct.install(device="cpu")
    changed = torch_geometric.loader.NodeLoader.filter_fn.__code__
    pyg_direct.uninstall()

    assert torch_geometric.loader.NodeLoader.filter_fn.__code__ is plain
    assert changed is not plain


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_lie_on_the_gpu(workers, served):
    pyg_direct.install()
    data, typed = make_data(), make_typed()
    try:
        loader = Kept(data, [4, 3], input_nodes=SEEDS, batch_size=5, num_workers=workers, filter_per_worker=False)
        for batch in loader:
            assert batch.x.is_cuda
            assert batch.edge_index.is_cuda
            assert_rows(batch.to("cpu"), data)
        assert len(served) == 4
        for pair in Pairs(typed, [4, 3], batch_size=12, num_workers=workers):
            for batch in pair:
                assert batch["a"].x.is_cuda == (workers == 0)
                batch = batch.to("cpu")
                assert torch.equal(batch["b"].x, typed["b"].x[batch["b"].n_id])
    finally:
        pyg_direct.uninstall()
