"""The loader of layers from before `NeighborLoader`: PyG's triples, with the device doing the work."""

import pickle
import weakref

import pytest
import torch
from torch_geometric.loader import NeighborSampler as PygNeighborSampler
from torch_geometric.nn import SAGEConv

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError, LoaderWarning
from pyg_direct.loader import NeighborSampler
from tests.batches import make_data
from tests.graphs import make_random_graph

EDGES = make_random_graph(70, 600).edge_index


def name_layers(n_id, adjs):
    """Global ends of the edges of each layer, sorted, with the sizes."""
    return [(sorted(map(tuple, n_id[adj.edge_index].t().tolist())), tuple(adj.size)) for adj in adjs]


@pytest.mark.sparse
def test_layers_are_those_of_pyg_when_all_neighbors_are_taken(real_device):
    options = {"sizes": [-1, -1], "node_idx": torch.arange(0, 70, 9), "batch_size": 4}

    batches = list(NeighborSampler(EDGES, **options, device=real_device))

    for (count, n_id, adjs), (size, nodes, layers) in zip(batches, PygNeighborSampler(EDGES, **options), strict=True):
        assert (count, sorted(n_id.tolist())) == (size, sorted(nodes.tolist()))
        assert n_id[:count].tolist() == nodes[:count].tolist()
        assert name_layers(n_id, adjs) == name_layers(nodes, layers)
        for adj in adjs:
            source, target = adj.edge_index
            assert torch.equal(torch.stack([n_id[source], n_id[target]]).cpu(), EDGES[:, adj.e_id.cpu()])
        assert n_id.device.type == real_device.type


def test_one_layer_comes_bare_and_edge_ids_may_stay_away(real_device):
    (batch,) = NeighborSampler(EDGES, [3], torch.tensor([5, 9]), return_e_id=False, batch_size=2, device=real_device)

    count, n_id, (edge_index, e_id, size) = batch
    assert (count, e_id) == (2, None)
    assert size == (n_id.numel(), 2)
    assert edge_index.shape[0] == 2


def test_layers_are_drawn_by_hand_too(real_device):
    loader, nodes = NeighborSampler(EDGES, [-1, -1], torch.arange(9), device=real_device), [40, 3]
    sent = pickle.loads(pickle.dumps(loader))

    for by_hand in (loader.sample, loader.collate_fn, sent.collate_fn):
        count, n_id, adjs = by_hand(nodes)
        assert (count, n_id[:2].tolist()) == (2, nodes)
        assert [adj.size[1] for adj in adjs] == [adjs[1].size[0], 2]

    alive = weakref.ref(loader)
    del loader, by_hand
    assert alive() is None


@pytest.mark.sparse
@pytest.mark.parametrize("has_values", [False, True])
def test_a_sparse_tensor_gives_sparse_tensors(real_device, has_values):
    sparse = pytest.importorskip("torch_sparse")
    values = torch.arange(600.0) if has_values else None
    # With parallel edges, which differ in their values alone.
    edges = torch.cat([EDGES, EDGES[:, :99]], dim=1)[:, -600:]
    adj_t = sparse.SparseTensor(row=edges[1], col=edges[0], value=values, sparse_sizes=(70, 70))
    row, col, value = adj_t.coo()

    batches = list(NeighborSampler(adj_t, [-1, -1], batch_size=16, device=real_device))

    for _, n_id, adjs in batches:
        for layer, e_id, size in adjs:
            targets, sources, own = layer.coo()
            assert (layer.size(0), layer.size(1)) == size[::-1]
            assert n_id[targets].tolist() == row[e_id.cpu()].tolist()
            assert n_id[sources].tolist() == col[e_id.cpu()].tolist()
            assert own is None if value is None else own.tolist() == value[e_id.cpu()].tolist()


def test_models_see_the_whole_neighborhood(real_device):
    data, convs = make_data(), [SAGEConv(5, 8), SAGEConv(8, 4)]
    convs = [conv.to(real_device) for conv in convs]
    x = (data.x / 70).to(real_device)

    with torch.no_grad():
        whole = convs[1](convs[0](x, EDGES.to(real_device)), EDGES.to(real_device))
        for count, n_id, adjs in NeighborSampler(EDGES, [-1, -1], batch_size=16, device=real_device, num_nodes=70):
            rows = x[n_id]
            for conv, (edge_index, _, size) in zip(convs, adjs, strict=True):
                rows = conv((rows, rows[: size[1]]), edge_index)

            assert torch.allclose(rows, whole[n_id[:count]], atol=1e-4)


def test_every_node_is_a_seed_once_and_masks_choose(real_device):
    mask = torch.arange(70) % 3 == 0

    seeds = [n_id[:count] for count, n_id, _ in NeighborSampler(EDGES, [2, 2], batch_size=16, shuffle=True,
                                                                device=real_device)]  # fmt: skip
    chosen = [n_id[:count] for count, n_id, _ in NeighborSampler(EDGES, [2], mask, batch_size=16, device=real_device)]

    assert sorted(torch.cat(seeds).tolist()) == list(range(70))
    assert torch.cat(chosen).tolist() == mask.nonzero().view(-1).tolist()


def test_equal_seeds_give_equal_epochs(real_device):
    epochs = [[n_id.tolist() for _, n_id, _ in NeighborSampler(EDGES, [2, 2], batch_size=16, shuffle=True, seed=seed,
                                                               prefetch=prefetch, device=real_device)]
              for seed, prefetch in ((1, 0), (1, 2), (2, 0))]  # fmt: skip

    assert epochs[0] == epochs[1] != epochs[2]


def test_a_transform_gets_the_three_parts(real_device):
    loader = NeighborSampler(EDGES, [2, 2], batch_size=70, transform=lambda size, n_id, adjs: (size, len(adjs)),
                             device=real_device)  # fmt: skip

    assert list(loader) == [(70, 2)]
    assert loader.sample([1, 2]) == (2, 2)


def test_it_takes_what_the_one_of_pyg_takes():
    loader = NeighborSampler(EDGES, sizes=[2, 4], batch_size=2, collate_fn=None, dataset=None, device="cpu")

    assert str(loader) == "NeighborSampler(70 seeds, [2, 4], batch_size=2, 35 batches, cpu)"
    assert len(loader) == 35


def test_workers_are_absorbed_with_one_word():
    with pytest.warns(LoaderWarning, match="^num_workers=2: not needed") as caught:
        NeighborSampler(EDGES, [2], num_workers=2, device="cpu")

    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sizes": [1.5]}, ArgumentTypeError, "sizes must hold integers, got 1.5"),
        ({"sizes": [-2]}, ArgumentError, "sizes must hold values of at least -1"),
        ({"edge_index": [[0], [1]]}, ArgumentTypeError, "edge_index must be a tensor or a SparseTensor, got list"),
        ({"node_idx": torch.tensor([70]), "num_nodes": 70}, IdError, r"node_idx must lie in \[0, 70\), got 70"),
        ({"num_nodes": 50}, IdError, r"must lie in \[0, 50\)"),
        ({"placement": "pinned"}, ArgumentError, "placement must be one of auto, cuda, unified, cpu, got 'pinned'"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(options, error, words):
    with pytest.raises(error, match=words):
        NeighborSampler(**{"edge_index": EDGES, "sizes": [2], "device": "cpu", **options})
