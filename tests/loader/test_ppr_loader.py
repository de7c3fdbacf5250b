"""Batches around seeds by personalised PageRank: the reference's neighborhoods with all edges among their nodes."""

import pickle

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import scatter

from pyg_direct import PPRLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.sampling.random_key import EpochKey
from tests.reference.ppr import find_neighbors

NUM_NODES, NUM_EDGES = 60, 500


def make_data(**more):
    generator = torch.Generator().manual_seed(1)
    # Nodes from 50 on have no edges.
    edge_index = torch.randint(50, (2, NUM_EDGES), generator=generator)
    return Data(x=torch.rand(NUM_NODES, 3, generator=generator), y=torch.arange(NUM_NODES), edge_index=edge_index,
                edge_attr=torch.arange(NUM_EDGES), name="graph", **more)  # fmt: skip


def rows_of(data):
    source, target = data.edge_index
    return [source[target == node].tolist() for node in range(data.num_nodes)]


def make(data=None, num_neighbors=5, input_nodes=None, **options):
    return PPRLoader(make_data() if data is None else data, num_neighbors, input_nodes,
                     **{"batch_size": 8, "num_walks": 8, "walk_length": 5, "seed": 7, "device": "cpu",
                        **options})  # fmt: skip


def look(loader):
    return [{key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch}
            for batch in loader]  # fmt: skip


def check_batch(batch, data, seeds, key, num_neighbors=5, alpha=0.2, num_walks=8, walk_length=5):
    """All of a batch follows from the graph, its seeds and its key."""
    count = len(seeds)
    expected = find_neighbors(rows_of(data), seeds, num_neighbors, alpha, num_walks, walk_length, key)
    nodes = batch.n_id.cpu()
    others = {node for row in expected for node, _ in row} - set(seeds)
    assert nodes.tolist() == seeds + sorted(others)
    assert batch.batch_size == count
    assert torch.equal(batch.x.cpu(), data.x[nodes])
    assert torch.equal(batch.y.cpu(), data.y[nodes])
    assert batch.name == "graph"
    source, target = batch.ppr_edge_index.tolist()
    pairs = [(nodes[one].item(), other) for one, other in zip(source, target, strict=True)]
    assert pairs == [(node, place) for place, row in enumerate(expected) for node, _ in row]
    weights = [score / (num_walks << 20) for row in expected for _, score in row]
    assert batch.ppr_weight.tolist() == pytest.approx(weights, rel=1e-6)
    assert batch.ppr_weight.dtype == torch.float32
    # A seed that repeats has its edges at its first place, and all that lead to it at each.
    inside = torch.isin(data.edge_index, nodes).all(0).nonzero().view(-1)
    assert set(batch.e_id.tolist()) == set(inside.tolist())
    assert torch.equal(nodes[batch.edge_index.cpu()], data.edge_index[:, batch.e_id.cpu()])
    assert torch.equal(batch.edge_attr.cpu(), batch.e_id.cpu())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_those_of_the_reference(real_device, prefetch):
    data, seeds = make_data(), torch.tensor([3, 59, 0, 12, 40, 7, 7, 1])
    loader = make(data, input_nodes=seeds, batch_size=3, device=real_device, prefetch=prefetch)

    for epoch in range(2):
        batches = list(loader)
        assert len(batches) == len(loader) == 3
        for number, batch in enumerate(batches):
            chosen = seeds[3 * number : 3 * number + 3]
            check_batch(batch, data, chosen.tolist(), EpochKey(7, epoch).of_batch(number))
            assert batch.input_id.tolist() == list(range(3 * number, min(8, 3 * number + 3)))
            assert batch.x.device.type == real_device.type
            batch.validate()


@pytest.mark.parametrize("placement", [pytest.param(name, marks=pytest.mark.gpu)
                                       for name in ("cuda", "unified", "pinned")])  # fmt: skip
def test_batches_do_not_depend_on_the_device(placement):
    assert look(make(device="cuda", placement=placement, shuffle=True)) == look(make(shuffle=True))


def test_options_of_walks_act():
    data, seeds = make_data(), list(range(8))
    options = {"num_neighbors": 2, "alpha": 0.6, "num_walks": 3, "walk_length": 2}

    batch = next(iter(make(data, input_nodes=seeds, **options)))

    check_batch(batch, data, seeds, EpochKey(7, 0).of_batch(0), **options)


def test_a_graph_with_an_adjacency_has_the_same_batches():
    from torch_geometric.transforms import ToSparseTensor

    data = Data(x=torch.rand(50, 2), edge_index=make_data().edge_index.unique(dim=1))
    sparse = ToSparseTensor(layout=torch.sparse_csr, remove_edge_index=True)(data.clone())

    for own, other in zip(make(sparse), make(data), strict=True):
        assert torch.equal(own.n_id, other.n_id)
        assert torch.equal(own.ppr_edge_index, other.ppr_edge_index)
        assert own.adj_t.to_dense().bool().sum() == other.edge_index.shape[1]


@pytest.mark.parametrize("nodes", [torch.arange(60) % 3 == 0, list(range(0, 60, 3)), torch.arange(0, 60, 3).int()])
def test_seeds_are_ids_or_a_mask(nodes):
    assert look(make(input_nodes=nodes)) == look(make(input_nodes=torch.arange(0, 60, 3)))
    assert sum(batch.batch_size for batch in make()) == NUM_NODES


def test_batches_follow_from_seed_epoch_and_number():
    loader, state = make(shuffle=True), torch.get_rng_state()
    epochs = [look(loader) for _ in range(2)]
    again = pickle.loads(pickle.dumps(make(shuffle=True, prefetch=0)))

    assert [look(again) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    assert look(make(shuffle=True, seed=8)) != epochs[0]
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_batches_follow_torchs_generator():
    epochs = []
    for _ in range(2):
        torch.manual_seed(3)
        epochs.append([look(make(shuffle=True, seed=None)), torch.rand(1).item()])

    assert epochs[0] == epochs[1]


def test_an_epoch_is_resumed():
    loader = make(shuffle=True)
    running = iter(loader)
    next(running), next(running)
    state, rest = loader.state_dict(), look(running)
    other = make(shuffle=True)
    other.load_state_dict(state)

    assert look(other) == rest
    assert len(rest) == 6


def test_a_batch_is_made_by_hand():
    data = make_data()
    loader = make(data, input_nodes=torch.arange(10, 30))

    batch = loader.collate_fn([4, 0])

    assert batch.n_id[:2].tolist() == [14, 10]
    assert batch.input_id.tolist() == [4, 0]
    with pytest.raises(IdError, match="index must"):
        loader.collate_fn([20])


def test_what_changes_in_the_graph_is_in_the_next_epoch():
    data = make_data()
    loader = make(data)
    list(loader)
    data.x = torch.zeros(NUM_NODES, 2)
    data.edge_index = torch.empty(2, 0, dtype=torch.int64)
    del data.edge_attr

    batch = next(iter(loader))

    assert batch.x.eq(0).all()
    assert batch.ppr_edge_index.tolist() == [list(range(8))] * 2
    assert batch.ppr_weight.eq(1).all()


def test_a_model_sums_over_neighborhoods():
    """As PPRGo (Bojchevski et al., KDD 2020): of constant rows a seed gets the weight of its neighborhood."""
    data = make_data()
    data.x = torch.ones(NUM_NODES, 1)

    for batch in make(data, num_neighbors=100):
        node, seed = batch.ppr_edge_index
        out = scatter(batch.x[node] * batch.ppr_weight.view(-1, 1), seed, dim_size=batch.batch_size)
        assert torch.allclose(out, torch.ones(batch.batch_size, 1))


def test_no_seeds_are_no_batches():
    assert list(make(input_nodes=[])) == []
    assert list(make(input_nodes=[], shuffle=True)) == []


@pytest.mark.parametrize(("options", "kind", "words"), [
    ({"num_neighbors": 0}, ArgumentError, "num_neighbors must be an integer of at least 1"),
    ({"alpha": 0}, ArgumentError, "alpha must lie between 0 and 1, got 0"),
    ({"alpha": 1.0}, ArgumentError, "alpha must lie between"),
    ({"alpha": float("nan")}, ArgumentError, "alpha must lie between"),
    ({"alpha": "much"}, ArgumentTypeError, "alpha must be a number"),
    ({"num_walks": 0}, ArgumentError, "num_walks must be an integer of at least 1"),
    ({"num_walks": 2**20}, ArgumentError, r"num_walks must lie in \[1, 65536\]"),
    ({"walk_length": 0}, ArgumentError, r"walk_length must lie in \[1, 1024\]"),
    ({"walk_length": 2.5}, ArgumentTypeError, "walk_length must be an integer"),
    ({"input_nodes": [60]}, IdError, "input_nodes must"),
    ({"input_nodes": torch.ones(9, dtype=torch.bool)}, ArgumentError, r"input_nodes must have shape \[60\] as a mask"),
    ({"input_nodes": "all"}, ArgumentTypeError, "input_nodes must be ids or a mask"),
    ({"data": HeteroData()}, ArgumentTypeError, "data must be a Data, got HeteroData"),
    ({"data": make_data(ppr_weight=torch.ones(3))}, ArgumentError, "data must have no ppr_weight"),
    ({"batchsize": 3}, ArgumentTypeError, "no option batchsize; did you mean batch_size"),
    ({"filter_per_worker": True}, ArgumentTypeError, "no option filter_per_worker")])  # fmt: skip
def test_what_makes_no_sense_is_refused(options, kind, words):
    with pytest.raises(kind, match=words):
        make(**options)


def test_a_graph_that_lost_seeds_is_named():
    data = make_data()
    loader = make(data)
    data.x, data.y = data.x[:55], data.y[:55]

    with pytest.raises(IdError, match="the graph has fewer nodes"):
        iter(loader)
