"""`sampler.NeighborSampler`: what PyG's loaders and Lightning ask of a sampler."""

import copy

import pytest
import torch
from torch_geometric.loader import LinkLoader as PygLinkLoader, NodeLoader as PygNodeLoader
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NodeSamplerInput,
    NumNeighbors,
    SamplerOutput,
)
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.testing import MyFeatureStore

from pyg_direct import FeatureStore, LinkLoader, NeighborLoader, NodeLoader
from pyg_direct.errors import ArgumentError, PygDirectError
from pyg_direct.sampler import NeighborSampler
from tests.batches import assert_equal_batches, check_contract, make_data
from tests.hetero_data import check_rows, make_hetero, name_edges


def around(*nodes, **options):
    """PyG's input for these nodes."""
    return NodeSamplerInput(None, torch.tensor(nodes), **options)


def test_it_is_a_sampler_of_pyg_with_final_edge_ids(real_device):
    sampler = NeighborSampler(make_data(), [2], device=real_device)

    assert isinstance(sampler, BaseSampler)
    assert sampler.edge_permutation is None


@pytest.mark.parametrize("loader_class", [PygNodeLoader, NodeLoader])
def test_loaders_of_both_kinds_take_it(real_device, loader_class):
    data = make_data()
    sampler = NeighborSampler(data, [3, 2], device=real_device)

    batches = list(loader_class(data, sampler, torch.arange(30), batch_size=16))

    for batch in batches:
        check_contract(data, batch, batch.input_id.tolist(), [3, 2])
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])


@pytest.mark.parametrize("loader_class", [PygNodeLoader, NodeLoader])
def test_loaders_of_both_kinds_take_it_with_types(real_device, loader_class):
    data = make_hetero()
    sampler = NeighborSampler(data, [3, 2], device=real_device)

    for batch in loader_class(data, sampler, "author", batch_size=10):
        check_rows(data, batch)


def test_a_foreign_sampler_is_served_with_rows_on_the_device(real_device):
    class Reversed(BaseSampler):
        """Numbers edges backwards, says so, and knows neither trees nor counts."""

        def __init__(self, inner):
            self.inner = inner

        @property
        def edge_permutation(self):
            return torch.arange(599, -1, -1)

        def sample_from_nodes(self, index):
            out = self.inner.sample_from_nodes(index)
            out.edge = 599 - out.edge.cpu()
            out.num_sampled_nodes = out.num_sampled_edges = None
            return out

        def sample_from_edges(self, index, neg_sampling=None):
            raise NotImplementedError

    data = make_data()
    sampler = Reversed(NeighborSampler(data, [3], device="cpu"))

    for batch in NeighborLoader(data, [3], neighbor_sampler=sampler, batch_size=16, device=real_device):
        assert torch.equal(batch.n_id[batch.edge_index].cpu(), data.edge_index[:, batch.e_id.cpu()])
        assert torch.equal(batch.edge_attr.cpu(), data.edge_attr[batch.e_id.cpu()])
        assert batch.x.device.type == real_device.type
        assert "num_sampled_nodes" not in batch


@pytest.mark.parametrize("loader_class", [PygNodeLoader, NodeLoader])
def test_types_that_a_foreign_sampler_leaves_out_are_empty(loader_class):
    class Alone(BaseSampler):
        """Knows the seeds and nothing else."""

        def sample_from_nodes(self, index):
            return HeteroSamplerOutput({"author": index.node}, {}, {}, {}, metadata=(index.input_id, index.time))

        def sample_from_edges(self, index, neg_sampling=None):
            raise NotImplementedError

    data = make_hetero()

    for batch in loader_class(data, Alone(), ("author", torch.arange(4)), batch_size=2):
        check_rows(data, batch)
        assert batch["author"].n_id.tolist() == batch["author"].input_id.tolist()
        assert batch["paper"].n_id.tolist() == []


class Seeds(BaseSampler):
    """A graph without edges but a loop at each seed, which only the sampler knows."""

    def sample_from_nodes(self, index):
        return self.make(index, index.node, (index.time,))

    def sample_from_edges(self, index, neg_sampling=None):
        ends = torch.arange(2 * index.row.numel()).view(2, -1)
        return self.make(index, torch.cat([index.row, index.col]), (ends, index.label, index.time))

    def make(self, index, node, rest):
        loop = torch.arange(node.numel())
        return SamplerOutput(node, loop, loop, None, metadata=(index.input_id, *rest))


class TypedSeeds(Seeds):
    """Likewise with types."""

    def make(self, index, node, rest):
        kind = index.input_type if isinstance(index.input_type, str) else index.input_type[0]
        loop, edge_type = torch.arange(node.numel()), (kind, "to", kind)
        return HeteroSamplerOutput({kind: node}, {edge_type: loop}, {edge_type: loop}, None,
                                   metadata=(index.input_id, *rest))  # fmt: skip


LINKS = torch.tensor([[3, 5, 6], [9, 2, 4]])


@pytest.mark.parametrize("own_store", [False, True])
@pytest.mark.parametrize(("peer", "loader_class", "seeds"), [
    (PygNodeLoader, NodeLoader, torch.tensor([3, 5, 6])), (PygNodeLoader, NodeLoader, torch.arange(70) % 9 == 2),
    (PygNodeLoader, NodeLoader, ("paper", torch.tensor([3, 5, 6]))), (PygLinkLoader, LinkLoader, (None, LINKS)),
])  # fmt: skip
def test_features_beside_a_sampler_that_has_the_edges_need_no_graph(own_store, peer, loader_class, seeds, real_device):
    features = FeatureStore(real_device) if own_store else MyFeatureStore()
    features.put_tensor(make_data().x, group_name=None, attr_name="x", index=None)
    expected = list(peer((features, None), Seeds(), seeds, batch_size=2))

    got = list(loader_class((features, None), Seeds(), seeds, batch_size=2, device=real_device))

    for batch, other in zip(got, expected, strict=True):
        for name in ("x", "edge_index", "n_id", "input_id", "edge_label_index"):
            assert torch.equal(batch[name].cpu(), other[name].cpu()) if name in other else name not in batch, name


def test_types_need_no_graph_either_where_a_sampler_tells_the_edges(real_device):
    data, features = make_hetero(), FeatureStore(real_device)
    features.put_tensor(data["paper"].x, group_name="paper", attr_name="x", index=None)

    (batch,) = NodeLoader((features, None), TypedSeeds(), ("paper", [7, 3]), batch_size=2, device=real_device)

    assert batch["paper"].x.tolist() == data["paper"].x[[7, 3]].tolist()
    assert batch["paper", "to", "paper"].edge_index.tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(("make", "words"), [
    (lambda data: NeighborLoader(data, [2], torch.arange(3)), "whose second is a NoneType and no GraphStore"),
    (lambda data: NodeLoader(data, Seeds()), "input_nodes must be ids or a mask .*, got None"),
    (lambda data: NodeLoader(data, Seeds(), "paper"), "input_nodes must have ids where .*, got paper"),
    (lambda data: LinkLoader(data, Seeds(), (None, None)), "edge_label_index must have the links where .*, got None"),
])  # fmt: skip
def test_what_only_a_graph_could_tell_must_be_given(make, words):
    with pytest.raises(PygDirectError, match=words):
        make((FeatureStore("cpu"), None))


def test_copies_share_the_graph_and_have_fanouts_of_their_own(real_device):
    sampler = NeighborSampler(make_data(), [2, 2], device=real_device, seed=1)
    sampler.sample_from_nodes(around(5))
    other = copy.copy(sampler)

    other.num_neighbors = [-1]

    assert sampler.num_neighbors.values == [2, 2]
    assert len(other.sample_from_nodes(around(5)).num_sampled_edges) == 1
    assert len(sampler.sample_from_nodes(around(5)).num_sampled_edges) == 2
    assert other._open_topology() is sampler._open_topology()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("num_neighbors", NumNeighbors([1]), lambda out: len(out.num_sampled_edges) == 1),
        ("replace", True, lambda out: out.num_sampled_edges[0] == 20),
        ("subgraph_type", "induced", lambda out: out.num_sampled_edges is None),
        ("subgraph_type", SubgraphType.bidirectional, lambda out: out.num_sampled_edges is None),
        ("disjoint", True, lambda out: out.batch is not None),
    ],
)  # fmt: skip
def test_options_can_be_set(real_device, name, value, says):
    data = make_data()
    data.edge_index = torch.stack([torch.arange(600) % 69 + 1, torch.arange(600) % 70])
    sampler = NeighborSampler(data, [20, 20], device=real_device)
    assert not says(sampler.sample_from_nodes(around(0)))

    setattr(sampler, name, value)

    assert says(sampler.sample_from_nodes(around(0)))


@pytest.mark.parametrize("is_hetero", [False, True])
def test_backward_is_forward_on_the_flipped_graph(real_device, is_hetero):
    data = make_hetero() if is_hetero else make_data()
    flipped = copy.copy(data)
    for store in flipped.edge_stores:
        store.edge_index = store.edge_index.flip(0)
    if is_hetero:
        edges = {kind: store.edge_index for kind, store in flipped.edge_items()}
        for kind in edges:
            del flipped[kind]
        for kind, edge_index in edges.items():
            flipped[kind[2], kind[1], kind[0]].edge_index = edge_index
    index = around(3, 8, input_type="paper" if is_hetero else None)

    out = NeighborSampler(data, [-1, -1], sample_direction="backward", device=real_device).sample_from_nodes(index)

    other = NeighborSampler(flipped, [-1, -1], device=real_device).sample_from_nodes(index)
    if not is_hetero:
        assert out.node.tolist() == other.node.tolist()
        assert torch.equal(out.row, other.col)
        assert torch.equal(out.col, other.row)
        assert torch.equal(out.edge, other.edge)
        return
    for kind, nodes in out.node.items():
        assert nodes.tolist() == other.node[kind].tolist()
    for kind, row in out.row.items():
        assert row.tolist() == other.col[kind[2], kind[1], kind[0]].tolist()
        assert out.edge[kind].tolist() == other.edge[kind[2], kind[1], kind[0]].tolist()


def test_calls_draw_anew_and_keys_draw_again(real_device):
    sampler = NeighborSampler(make_data(), [2, 2], device=real_device, seed=1)
    index = around(*range(20))

    first, second = sampler.sample_from_nodes(index), sampler.sample_from_nodes(index)
    again, other = (sampler.sample_from_nodes(index, key=7).edge.tolist() for _ in range(2))

    assert first.edge.tolist() != second.edge.tolist()
    assert again == other
    repeated = NeighborSampler(make_data(), [2, 2], device=real_device, seed=1).sample_from_nodes(index)
    assert repeated.edge.tolist() == first.edge.tolist()


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_workers_of_loaders_of_pyg_draw_anew_in_each_and_in_every_epoch(options):
    def read_epochs():
        torch.manual_seed(3)
        sampler = NeighborSampler(make_data(), [2, 2], device="cpu", seed=1)
        seeds = torch.arange(20).repeat(4)
        loader = PygNodeLoader(make_data(), sampler, seeds, batch_size=20, num_workers=2, **options)
        return [batch.e_id.tolist() for _ in range(2) for batch in loader]

    drawn, again = read_epochs(), read_epochs()

    assert len(drawn) == 8
    assert all(drawn.count(edges) == 1 for edges in drawn)
    assert drawn == again


def test_metadata_is_what_loaders_of_pyg_read(real_device):
    sampler = NeighborSampler(make_data(), [2], device=real_device)
    ids, ends = torch.tensor([9, 8]), torch.tensor([[1, 2], [3, 1]])
    index = EdgeSamplerInput(ids, *ends, label=torch.tensor([4, 5]))

    binary = sampler.sample_from_edges(index)
    triplet = sampler.sample_from_edges(EdgeSamplerInput(ids, *ends), neg_sampling="triplet")

    assert [len(out.metadata) for out in (binary, triplet)] == [4, 5]
    assert binary.metadata[0].tolist() == ids.tolist()
    assert binary.node[binary.metadata[1]].tolist() == ends.tolist()
    assert binary.metadata[2].tolist() == [4, 5]
    assert triplet.node[triplet.metadata[1]].tolist() == [1, 2]
    assert triplet.node[triplet.metadata[2]].tolist() == [3, 1]


def test_plain_loaders_and_loaders_with_a_sampler_draw_alike(real_device):
    data = make_data()
    sampler = NeighborSampler(data, [3, 2], device=real_device)

    batches = list(NeighborLoader(data, [3, 2], neighbor_sampler=sampler, batch_size=16, seed=5))

    for batch, other in zip(batches, NeighborLoader(data, [3, 2], batch_size=16, seed=5, device=real_device),
                            strict=True):  # fmt: skip
        assert_equal_batches(batch, other)


def test_seeds_of_types_are_kept_apart_by_equal_ids(real_device):
    data = make_hetero()

    out = [next(iter(NodeLoader(data, NeighborSampler(data, [-1], device=real_device), (kind, torch.tensor([4])))))
           for kind in ("paper", "author")]  # fmt: skip

    assert name_edges(out[0]) != name_edges(out[1])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sample_direction": "up"}, ArgumentError, "sample_direction must be 'forward' or 'backward', got 'up'"),
        ({"sample_direction": "backward", "time_attr": "y"}, NotImplementedError, "time_attr with sample_direction"),
        ({"num_neighbors": [1] * 40}, ArgumentError, "num_neighbors must have at most 31 hops, got 40"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(options, error, words):
    with pytest.raises(error, match=words):
        NeighborSampler(**{"data": make_data(), "num_neighbors": [2], "device": "cpu", **options})
