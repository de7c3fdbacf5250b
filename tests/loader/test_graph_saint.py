"""GraphSAINT's samplers draw nodes with PyG's chances, take all edges among them, and count PyG's norms."""

import math
import pickle
from collections import Counter

import pytest
import torch
import torch_geometric.loader as pyg_loader
from torch_geometric.data import Data

from pyg_direct import GraphSAINTEdgeSampler, GraphSAINTNodeSampler, GraphSAINTRandomWalkSampler
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.loader import GraphSAINTSampler
from pyg_direct.sampling.random_key import batch_key, norm_key
from tests.reference import saint as reference, walks as walks_reference
from tests.reference.draw import draw_below

WALK_START = 2**62 + 4


def make_data(num_nodes=30, num_edges=200):
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    return Data(x=torch.rand(num_nodes, 3, generator=generator), y=torch.arange(num_nodes), edge_index=edge_index,
                edge_attr=torch.arange(num_edges), train_mask=torch.arange(num_nodes) < 20, name="graph",
                level=torch.ones(2))  # fmt: skip


MAKE = {
    "nodes": lambda data, **options: GraphSAINTNodeSampler(data, **{"batch_size": 9, "num_steps": 4, **options}),
    "edges": lambda data, **options: GraphSAINTEdgeSampler(data, **{"batch_size": 6, "num_steps": 4, **options}),
    "walks": lambda data, **options: GraphSAINTRandomWalkSampler(
        data, **{"batch_size": 4, "walk_length": 3, "num_steps": 4, **options}),
}  # fmt: skip
samplers = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in MAKE.items()])


def list_batches(sampler):
    return [(batch.y.tolist(), batch.edge_attr.tolist()) for batch in sampler]


@samplers
def test_batches_are_the_subgraphs_of_their_nodes(real_device, make):
    data = make_data()

    sampler = make(data, seed=1, device=real_device)

    assert len(sampler) == 4
    assert len(list(sampler)) == 4
    for batch in sampler:
        nodes = batch.y.cpu()
        assert set(batch.keys()) == {*data.keys(), "num_nodes"}
        assert torch.equal(nodes, nodes.unique())
        assert batch.num_nodes == nodes.numel()
        assert torch.equal(batch.x.cpu(), data.x[nodes])
        assert torch.equal(batch.train_mask.cpu(), data.train_mask[nodes])
        assert (batch.name, batch.level.tolist()) == ("graph", [1, 1])
        assert sorted(batch.edge_attr.tolist()) == data.subgraph(nodes).edge_attr.tolist()
        assert torch.equal(nodes[batch.edge_index.cpu()], data.edge_index[:, batch.edge_attr.cpu()])
        assert torch.equal(batch.edge_index[1], batch.edge_index[1].sort().values)


@pytest.mark.sparse
@pytest.mark.parametrize("name", MAKE)
def test_batches_and_norms_are_pygs(name):
    data, options = make_data(), {"num_steps": 30, "sample_coverage": 400, "log": False}
    options |= {"nodes": {"batch_size": 9}, "edges": {"batch_size": 6}, "walks": {"batch_size": 4, "walk_length": 3}}[
        name
    ]
    ours = MAKE[name](data, seed=3, device="cpu", **options)
    theirs = getattr(pyg_loader, type(ours).__name__)(data, **options)

    for batch in ours:
        subgraph, _ = theirs.adj.saint_subgraph(batch.y)
        expected = theirs._collate([(batch.y, subgraph)])
        assert set(batch.keys()) == set(expected.keys())
        assert torch.equal(batch.x, expected.x)
        listed = [sorted(zip(*own.edge_index.tolist(), own.edge_attr.tolist(), strict=True))
                  for own in (batch, expected)]  # fmt: skip
        assert listed[0] == listed[1]
    # Either counts in batches of its own.
    assert torch.allclose(ours.node_norm, theirs.node_norm, rtol=0.3)
    assert torch.allclose(ours.node_norm.mean(), theirs.node_norm.mean(), rtol=0.05)
    assert torch.allclose(ours.edge_norm.median(), theirs.edge_norm.median(), rtol=0.1)


@samplers
def test_draws_follow_from_seed_epoch_and_number_on_every_device(real_device, make):
    sampler = make(make_data(), seed=5, device=real_device)

    epochs = [list_batches(sampler) for _ in range(2)]

    assert list_batches(make(make_data(), seed=5, device="cpu", prefetch=0)) == epochs[0]
    assert epochs[0] != epochs[1]
    assert len({str(batch) for batch in epochs[0]}) == 4
    assert list_batches(make(make_data(), seed=6, device="cpu")) != epochs[0]


def test_walks_are_those_of_the_reference():
    data = make_data()
    rows = [data.edge_index[1][data.edge_index[0] == node].tolist() for node in range(30)]

    batches = list_batches(MAKE["walks"](data, seed=5, device="cpu"))

    for number, (nodes, _) in enumerate(batches):
        key = batch_key(5, 0, number)
        walks = [walks_reference.walk(rows, draw_below(key, item, WALK_START, 30), 3, (1, 1, 1), key, item)
                 for item in range(4)]  # fmt: skip
        assert nodes == sorted({node for walk in walks for node in walk})


def test_without_a_seed_epochs_follow_torch():
    def draw():
        torch.manual_seed(7)
        return list_batches(MAKE["nodes"](make_data(), device="cpu", sample_coverage=2, log=False))

    assert draw() == draw()


@samplers
def test_an_epoch_goes_on_where_its_state_was_taken_also_in_another_process(make):
    sampler = make(make_data(), seed=3, device="cpu", sample_coverage=2, log=False)
    whole = list_batches(sampler)
    sampler.load_state_dict({"seed": 3, "epoch": 0, "batch": 0})
    batches = iter(sampler)
    next(batches), next(batches)

    sent = pickle.loads(pickle.dumps(sampler))
    sent.load_state_dict(sampler.state_dict())

    assert list_batches(sent) == whole[2:]
    assert torch.equal(sent.node_norm, sampler.node_norm)


def bound_chi_square(degrees):
    """What a sum of squares exceeds by chance once in 10**9 (Laurent and Massart, 2000, lemma 1)."""
    tail = math.log(10**9)
    return degrees + 2 * math.sqrt(degrees * tail) + 2 * tail


def measure(counts, chances):
    total = sum(counts.values())
    wanted = {item: total * float(chance) for item, chance in chances.items()}
    return sum((counts[item] - count) ** 2 / count for item, count in wanted.items())


def draw(sampler, count):
    """So many draws as of one batch, on the CPU."""
    sampler._prepare()
    return sampler._find_nodes(sampler._draw(torch.arange(count, device=sampler.device), 77)).cpu()


def test_nodes_are_drawn_as_often_as_edges_leave_them(real_device):
    data = make_data(8, 20)

    counts = Counter(draw(GraphSAINTNodeSampler(data, 1, device=real_device), 20_000).tolist())

    chances = reference.chances_of_sources(list(zip(*data.edge_index.tolist(), strict=True)))
    assert set(counts) == set(chances)
    assert measure(counts, chances) < bound_chi_square(len(chances) - 1)


def test_edges_are_drawn_as_often_as_edges_meet_their_ends(real_device):
    edges = [(0, 1), (1, 2), (2, 3), (3, 1), (4, 1), (4, 0), (5, 4), (5, 1), (2, 5)]
    data = Data(edge_index=torch.tensor(edges).t().contiguous(), num_nodes=6)

    targets, sources = draw(GraphSAINTEdgeSampler(data, 1, device=real_device), 20_000).view(2, -1).tolist()

    counts = Counter(zip(sources, targets, strict=True))
    chances = dict(zip(edges, reference.chances_of_edges(edges), strict=True))
    assert set(counts) == set(chances)
    assert measure(counts, chances) < bound_chi_square(len(chances) - 1)


def test_edges_that_none_leads_on_from_are_equally_likely_as_in_pyg(real_device):
    edges = [(0, 3), (1, 3), (2, 4)]
    data = Data(edge_index=torch.tensor(edges).t().contiguous(), num_nodes=5)

    targets, sources = draw(GraphSAINTEdgeSampler(data, 1, device=real_device), 20_000).view(2, -1).tolist()

    counts = Counter(zip(sources, targets, strict=True))
    chances = dict(zip(edges, reference.chances_of_edges(edges), strict=True))
    assert set(counts) == set(chances) == set(edges)
    assert measure(counts, chances) < bound_chi_square(2)


@samplers
@pytest.mark.parametrize("coverage", [1, 7])
def test_norms_are_counted_in_batches_of_their_own(real_device, make, coverage):
    data = make_data()
    edges = list(zip(*data.edge_index.tolist(), strict=True))

    sampler = make(data, seed=4, sample_coverage=coverage, log=False, device=real_device)

    batches, found = [], 0
    while found < 30 * coverage:
        for number in range(len(batches), len(batches) + 4):
            sample = sampler._start(norm_key(4, number)).finish()
            batches.append((sample.n_id.tolist(), sample.e_id.tolist()))
            found += sample.n_id.numel()
    of_nodes, of_edges = reference.norms(30, edges, batches)
    assert torch.allclose(sampler.node_norm, torch.tensor(of_nodes))
    assert torch.allclose(sampler.edge_norm, torch.tensor(of_edges))
    for batch in sampler:
        assert torch.equal(batch.node_norm.cpu(), sampler.node_norm[batch.y.cpu()])
        assert torch.equal(batch.edge_norm.cpu(), sampler.edge_norm[batch.edge_attr.cpu()])


def test_norms_make_sums_over_batches_those_of_the_graph():
    # With many batches the normed loss of a node, and an edge's share of its source, are right on average.
    data = make_data(12, 60)
    sampler = GraphSAINTNodeSampler(data, 6, num_steps=800, sample_coverage=600, seed=1, log=False, device="cpu")
    nodes, edges = torch.zeros(12), torch.zeros(60)

    for batch in sampler:
        nodes[batch.y] += batch.node_norm
        edges[batch.edge_attr] += batch.edge_norm * batch.node_norm[batch.edge_index[0]]

    assert torch.allclose(nodes / 800, torch.full((12,), 1 / 12), rtol=0.2)
    assert torch.allclose(edges / 800, torch.full((60,), 1 / 12), rtol=0.4)


@samplers
def test_saved_norms_are_read_again_also_pygs(tmp_path, make, monkeypatch):
    data = make_data()
    first = make(data, seed=4, sample_coverage=3, log=False, save_dir=str(tmp_path / "norms"), device="cpu")
    (path,) = (tmp_path / "norms").iterdir()
    monkeypatch.setattr(type(first), "_compute_norm", lambda self: pytest.fail("they were counted"))

    again = make(data, seed=9, sample_coverage=3, log=False, save_dir=str(tmp_path / "norms"), device="cpu")

    assert path.name == first._filename == f"{type(first).__name__.lower()}_{'3_' * ('Walk' in str(type(first)))}3.pt"
    assert torch.equal(again.node_norm, first.node_norm)
    assert torch.equal(again.edge_norm, first.edge_norm)
    with pytest.raises(ArgumentError, match=r"norms of the 30 nodes and 150 edges of data, got .*: delete it"):
        make(make_data(30, 150), sample_coverage=3, log=False, save_dir=str(tmp_path / "norms"), device="cpu")
    torch.save("nothing", path)
    with pytest.raises(ArgumentError, match=r"got nothing in .*: delete it, or give another folder"):
        make(data, sample_coverage=3, log=False, save_dir=str(tmp_path / "norms"), device="cpu")
    path.write_bytes(b"no file of torch's")
    with pytest.raises(ArgumentError, match="save_dir must be a whole file of norms"):
        make(data, sample_coverage=3, log=False, save_dir=str(tmp_path / "norms"), device="cpu")


def test_progress_is_shown_unless_log_is_off(monkeypatch):
    from pyg_direct.loader import graph_saint

    shown = []
    real = graph_saint.Bar
    monkeypatch.setattr(
        graph_saint, "Bar", lambda *args, is_shown: (shown.append(is_shown), real(*args, is_shown=False))[1]
    )

    for log in (True, False):
        MAKE["nodes"](make_data(), sample_coverage=1, log=log, device="cpu")

    assert shown == [True, False]


@samplers
def test_they_are_pygs_classes(make):
    sampler = make(make_data(), device="cpu")

    assert isinstance(sampler, getattr(pyg_loader, type(sampler).__name__))
    assert isinstance(sampler, pyg_loader.GraphSAINTSampler)
    assert (sampler.N, sampler.E, sampler.num_steps, sampler.batch_size) == (30, 200, 4, 1)


def test_nodes_without_edges_keep_their_walks_and_are_in_no_other_batch():
    data = Data(edge_index=torch.tensor([[0], [1]]), y=torch.arange(4), num_nodes=4)

    walks = GraphSAINTRandomWalkSampler(data, 2, 5, num_steps=40, seed=1, device="cpu")
    nodes = GraphSAINTNodeSampler(data, 2, num_steps=5, seed=1, device="cpu")

    assert {node for batch in walks for node in batch.y.tolist()} == {0, 1, 2, 3}
    assert all(batch.y.tolist() == [0] for batch in nodes)


@samplers
@pytest.mark.parametrize(("options", "error", "words"), [
    ({"data": [1]}, ArgumentTypeError, "data must be a Data, got list"),
    ({"data": Data(x=torch.rand(3, 2))}, ArgumentTypeError, "data.edge_index must be a tensor, got NoneType"),
    ({"data": Data(x=torch.rand(3, 2), edge_index=torch.empty(2, 0, dtype=torch.int64))}, ArgumentError,
     "data must have nodes and edges to draw from, got 3 and 0"),
    ({"data": Data(x=torch.rand(3, 2), edge_index=torch.tensor([[0], [3]]))}, IdError, "3"),
    ({"data": make_data().update({"node_norm": torch.ones(30)})}, ArgumentError, "data must have no node_norm"),
    ({"data": make_data().update({"adj_t": torch.eye(30)})}, NotImplementedError, "adj_t"),
    ({"batch_size": 0}, ArgumentError, "batch_size must be an integer of at least 1, got 0"),
    ({"num_steps": 0}, ArgumentError, "num_steps must be an integer of at least 1, got 0"),
    ({"sample_coverage": -1}, ArgumentError, "sample_coverage must be an integer of at least 0, got -1"),
    ({"log": 2}, ArgumentTypeError, "log must be True or False, got 2"),
    ({"filter_per_worker": True}, ArgumentTypeError, "has no option filter_per_worker"),
])  # fmt: skip
def test_bad_arguments_are_named(make, options, error, words):
    with pytest.raises(error, match=words):
        list(make(**{"data": make_data(), "device": "cpu", **options}))


def test_bad_lengths_of_walks_are_named():
    with pytest.raises(ArgumentError, match=r"walk_length must lie in \[0, 2\*\*31\), got -1"):
        GraphSAINTRandomWalkSampler(make_data(), 2, -1, device="cpu")


def test_what_is_not_offered_says_so():
    class Mine(GraphSAINTSampler):
        def _sample_nodes(self, batch_size):
            return torch.arange(batch_size)

    sampler = MAKE["nodes"](make_data(), device="cpu")
    with pytest.raises(NotImplementedError, match=r"_sample_nodes of .*Mine would not be called"):
        Mine(make_data(), 3, device="cpu")
    for ask in (lambda: sampler[0], lambda: sampler._collate([(1, 2)]), lambda: sampler.collate_fn([0])):
        with pytest.raises(NotImplementedError, match="go over the sampler"):
            ask()
    with pytest.raises(NotImplementedError, match="GraphSAINTSampler draws nothing"):
        list(GraphSAINTSampler(make_data(), 3, device="cpu"))


def test_a_graph_that_changed_needs_a_new_sampler():
    data = make_data()
    sampler = MAKE["walks"](data, device="cpu")
    list(sampler)
    data.edge_index, data.edge_attr = data.edge_index[:, :100], data.edge_attr[:100]

    with pytest.raises(ArgumentError, match=r"30 nodes and 200 edges .* got 30 and 100: make a new one"):
        list(sampler)
