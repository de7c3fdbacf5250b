"""The sampler keeps PyG's contract: bipartite layers, outermost first, whose edges are edges of the graph."""

import pytest
import torch
from torch.utils.data import DataLoader
from torch_geometric.nn import SAGEConv

from pyg_direct import Adj, CSRTopo, GraphSageSampler
from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError, IdError
from pyg_direct.sampling.random_key import call_key
from tests.graphs import make_graph, make_random_graph
from tests.reference.sample import sample
from tests.sage import GRAPH, SEEDS, make_sampler


def name_edges(n_id, adj):
    """Global (source, target) of every edge of a layer."""
    source, target = adj.edge_index
    return torch.stack([n_id[source], n_id[target]])


def test_layers_match_reference(device):
    sampler = make_sampler(device, (3, 2))
    expected = sample(GRAPH.in_rows(), SEEDS, [3, 2], call_key(7, 0), expand_all=True)

    n_id, batch_size, adjs = sampler.sample(torch.tensor(SEEDS))

    inner, outer = adjs[::-1]
    cut = expected.edge_counts[1]
    assert (n_id.tolist(), batch_size) == (expected.n_id, len(SEEDS))
    assert inner.edge_index.tolist() == [row[:cut] for row in expected.edge_index]
    assert outer.edge_index.tolist() == [row[cut:] for row in expected.edge_index]
    assert inner.e_id.tolist() + outer.e_id.tolist() == expected.e_id
    assert {tensor.device for tensor in (n_id, inner.e_id, outer.edge_index)} == {sampler.device}


def test_layers_come_outermost_first(device):
    n_id, batch_size, adjs = make_sampler(device, (4, 3)).sample(SEEDS)

    sizes = [adj.size for adj in adjs]

    assert sizes[0][0] == len(n_id)
    assert sizes[0][1] == sizes[1][0]
    assert sizes[1][1] == batch_size == len(SEEDS)
    assert all(int(adj.edge_index[0].max()) < adj.size[0] for adj in adjs)
    assert all(int(adj.edge_index[1].max()) < adj.size[1] for adj in adjs)


def test_edge_ids_point_to_the_edges(device):
    n_id, _, adjs = make_sampler(device, (4, 3)).sample(SEEDS)

    got = [name_edges(n_id, adj).cpu() for adj in adjs]

    assert all(torch.equal(edges, GRAPH.edge_index[:, adj.e_id.cpu()]) for edges, adj in zip(got, adjs, strict=True))


def test_edge_ids_are_those_given_with_the_rows(device):
    indptr, indices, edge_ids = GRAPH.in_rows()
    topo = CSRTopo(indptr=torch.tensor(indptr), indices=torch.tensor(indices), eid=torch.tensor(edge_ids))

    n_id, _, adjs = GraphSageSampler(topo, [4, 3], device).sample(SEEDS)

    assert all(torch.equal(name_edges(n_id, a).cpu(), GRAPH.edge_index[:, a.e_id.cpu()]) for a in adjs)


def test_full_fanout_takes_all_in_edges(device):
    sources, targets = GRAPH.edge_index
    nodes = torch.tensor([5, 0, 66])
    for_each = [(targets == node).nonzero().view(-1) for node in nodes]

    n_id, _, (adj,) = make_sampler(device, (-1,)).sample(nodes)

    assert adj.e_id.tolist() == torch.cat(for_each).tolist()
    assert sorted(n_id.tolist()) == sorted({5, 0, 66, *sources[torch.cat(for_each)].tolist()})


def test_full_fanout_grows_by_whole_neighborhoods(device):
    sources, targets = GRAPH.edge_index
    reached = {66}
    for _ in range(2):
        reached |= set(sources[torch.isin(targets, torch.tensor(list(reached)))].tolist())

    n_id, _, adjs = make_sampler(device, (-1, -1)).sample([66])

    inner = set(n_id[: adjs[0].size[1]].tolist())
    assert set(n_id.tolist()) == reached
    assert sorted(adjs[0].e_id.tolist()) == [e for e, target in enumerate(targets.tolist()) if target in inner]


def test_every_node_so_far_takes_part_in_every_layer(device):
    n_id, _, adjs = make_sampler(device, (2, 2)).sample(SEEDS)
    degree = torch.bincount(GRAPH.edge_index[1], minlength=70)

    counts = torch.bincount(adjs[0].edge_index[1].cpu(), minlength=adjs[0].size[1])

    assert torch.equal(counts, degree[n_id[: adjs[0].size[1]].cpu()].clamp(max=2))


def test_repeated_seeds_keep_their_rows_and_edges(device):
    n_id, batch_size, (adj,) = make_sampler(device, (3,)).sample([8, 1, 8])
    edges_of_row = [adj.e_id[adj.edge_index[1] == row].tolist() for row in range(3)]

    assert batch_size == 3
    assert n_id[:3].tolist() == [8, 1, 8]
    assert edges_of_row[0] == edges_of_row[2] != []
    assert len(set(n_id[3:].tolist()) & {8, 1}) == 0


def test_no_seeds_and_no_layers_are_batches_too(device):
    n_id, batch_size, adjs = make_sampler(device, (3, 2)).sample([])
    alone, _, none = make_sampler(device, ()).sample([4, 4])

    assert (n_id.tolist(), batch_size) == ([], 0)
    assert [adj.size for adj in adjs] == [(0, 0), (0, 0)]
    assert (alone.tolist(), none) == ([4, 4], [])


def test_size_zero_takes_no_edges(device):
    n_id, _, (adj,) = make_sampler(device, (0,)).sample([4, 2])

    assert n_id.tolist() == [4, 2]
    assert (adj.edge_index.shape, adj.e_id.shape, adj.size) == ((2, 0), (0,), (2, 2))


@pytest.mark.parametrize("seeds", [
    torch.tensor(SEEDS), torch.tensor(SEEDS).int(), SEEDS, tuple(SEEDS), torch.tensor(SEEDS).repeat_interleave(2)[::2],
])  # fmt: skip
def test_seeds_of_any_form_give_one_batch(seeds):
    expected, _, _ = make_sampler().sample(torch.tensor(SEEDS))

    n_id, _, _ = make_sampler().sample(seeds)

    assert torch.equal(n_id, expected)


def test_a_default_device_changes_no_batch():
    (expected, _, _), sampler = make_sampler().sample(SEEDS), make_sampler()

    with torch.device("meta"):
        n_id, _, _ = sampler.sample(SEEDS)

    assert torch.equal(n_id, expected)


def test_a_default_device_changes_no_layer_and_no_order():
    seeds, (first, second) = torch.tensor(SEEDS), (make_sampler(), make_sampler())
    expected = first.reindex(seeds, *first.sample_layer(seeds, 3, key=5))

    with torch.device("meta"):
        got = second.reindex(seeds, *second.sample_layer(seeds, 3, key=5))

    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.gpu
def test_seeds_on_the_gpu_and_on_the_cpu_give_one_batch():
    expected, _, _ = make_sampler("cpu").sample(SEEDS)

    batches = [
        make_sampler(device).sample(torch.tensor(SEEDS, device=seeds_at))[0].cpu()
        for device, seeds_at in (("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda"))
    ]

    assert all(torch.equal(batch, expected) for batch in batches)


@pytest.mark.gpu
def test_modes_give_one_batch():
    samplers = [make_sampler(None, mode=mode) for mode in ("GPU", "UVA", "CPU", "auto")]

    batches = [sampler.sample(SEEDS) for sampler in samplers]

    assert [str(sampler.device) for sampler in samplers] == ["cuda:0", "cuda:0", "cpu", "cuda:0"]
    assert len({tuple(n_id.tolist()) for n_id, _, _ in batches}) == 1
    assert len({tuple(adjs[0].e_id.tolist()) for _, _, adjs in batches}) == 1


def test_equal_seeds_give_equal_sequences(device):
    samplers = make_sampler(device), make_sampler(device)

    sequences = [[sampler.sample(SEEDS)[2][0].e_id.tolist() for _ in range(3)] for sampler in samplers]

    assert sequences[0] == sequences[1]
    assert sequences[0][0] != sequences[0][1] != sequences[0][2]


def test_other_seeds_give_other_batches():
    batches = {tuple(make_sampler(seed=seed).sample(SEEDS)[2][0].e_id.tolist()) for seed in range(10)}

    assert len(batches) == 10


def test_no_seed_follows_torch():
    batches = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        batches.append(make_sampler(seed=None).sample(SEEDS)[2][0].e_id.tolist())

    assert batches[0] == batches[1] != batches[2]


def test_key_draws_a_batch_again():
    sampler = make_sampler()
    first = sampler.sample(SEEDS, key=call_key(7, 0))[0]

    counted = sampler.sample(SEEDS)[0]

    assert torch.equal(first, counted)


def test_a_loader_of_seeds_drives_the_sampler(device):
    sampler = make_sampler(device)
    loader = DataLoader(torch.arange(70), batch_size=32, shuffle=True, drop_last=False)

    met = []
    for seeds in loader:
        n_id, batch_size, adjs = sampler.sample(seeds)
        met += n_id[:batch_size].tolist()
        assert adjs[-1].size[1] == batch_size == len(seeds)

    assert sorted(met) == list(range(70))


def test_layers_feed_a_bipartite_convolution(device):
    torch.manual_seed(0)
    features = torch.randn(70, 8)
    conv = SAGEConv(8, 5)
    sources, targets = GRAPH.edge_index
    expected = conv(features, torch.stack([sources, targets]))

    n_id, batch_size, (adj,) = make_sampler(device, (-1,)).sample([3, 66, 0])
    adj = adj.to("cpu")
    got = conv((features[n_id.cpu()], features[n_id[:batch_size].cpu()]), adj.edge_index, size=adj.size)

    assert isinstance(adj, Adj)
    torch.testing.assert_close(got, expected[[3, 66, 0]])


def test_two_layers_feed_two_convolutions(device):
    torch.manual_seed(0)
    features = torch.randn(70, 8)
    convs = [SAGEConv(8, 6), SAGEConv(6, 5)]
    expected = convs[1](convs[0](features, GRAPH.edge_index).relu(), GRAPH.edge_index)

    n_id, _, adjs = make_sampler(device, (-1, -1)).sample([3, 66])
    x = features[n_id.cpu()]
    for layer, (edge_index, _, size) in enumerate(adj.to("cpu") for adj in adjs):
        x = convs[layer]((x, x[: size[1]]), edge_index, size=size)
        x = x.relu() if layer == 0 else x

    torch.testing.assert_close(x, expected[[3, 66]])


def test_sampler_says_what_it_is():
    assert repr(make_sampler()) == (
        "GraphSageSampler(CSRTopo(70 nodes, 600 edges), sizes=[3, 2], device=cpu, mode='auto')"
    )


def test_large_graph_is_sampled_by_sorting():
    graph = make_graph(2**24 + 1, [(2**24, 5), (7, 5)])

    n_id, _, (adj,) = make_sampler("cpu", (-1,), graph).sample([5])

    assert n_id.tolist() == [5, 7, 2**24]
    assert adj.edge_index.tolist() == [[2, 1], [0, 0]]


@pytest.mark.parametrize(("seeds", "error", "words"), [
    ([0, 70], IdError, r"input_nodes must lie in \[0, 70\), got 70"),
    ([-1], IdError, r"input_nodes must lie in \[0, 70\), got -1"),
    ([0.5], ArgumentTypeError, "input_nodes must have dtype int64 or int32, got torch.float32"),
    (torch.tensor([True]), ArgumentTypeError, "input_nodes must have dtype int64 or int32, got torch.bool"),
    (torch.tensor(3), ArgumentError, r"input_nodes must have one dimension, got shape \(\)"),
    (3, ArgumentError, r"input_nodes must have one dimension, got shape \(\)"),
    ("all", ArgumentTypeError, "input_nodes must be ids, got 'all'"),
    (None, ArgumentTypeError, "input_nodes must be ids, got None"),
])  # fmt: skip
def test_bad_seeds_are_refused_and_the_sampler_stays_usable(device, seeds, error, words):
    sampler = make_sampler(device)

    with pytest.raises(error, match=words):
        sampler.sample(seeds)
    got = sampler.sample(SEEDS)[0]

    assert torch.equal(got, make_sampler(device).sample(SEEDS)[0])


@pytest.mark.gpu
def test_bad_seeds_on_the_gpu_are_told_at_the_wait():
    sampler = make_sampler("cuda")

    with pytest.raises(IdError, match=r"must lie in \[0, 70\), got 70"):
        sampler.sample(torch.tensor([0, 70], device="cuda"))

    assert sampler.sample(SEEDS, key=1)[1] == 4


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"sizes": [2, -2]}, ArgumentError, "sizes must hold values of at least -1, got -2"),
    ({"sizes": [2.5]}, ArgumentTypeError, r"sizes must hold integers, got 2\.5"),
    ({"sizes": [1] * 32}, ArgumentError, "sizes must have at most 31 hops, got 32"),
    ({"mode": "GPU", "device": "cpu"}, ArgumentError, "mode='GPU' needs a GPU, got device='cpu'"),
    ({"mode": "ZERO_COPY"}, ArgumentError, "mode must be one of auto, GPU, UVA, CPU, got 'ZERO_COPY'"),
    ({"seed": 1.5}, ArgumentTypeError, r"seed must be an integer or None, got 1\.5"),
    ({"device": "tpu"}, ArgumentError, "device must name a torch device, got 'tpu'"),
])  # fmt: skip
def test_bad_options_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        make_sampler(**options)


def test_something_else_than_a_topology_is_refused():
    with pytest.raises(ArgumentTypeError, match="csr_topo must be a CSRTopo, got Tensor"):
        GraphSageSampler(GRAPH.edge_index, [2])


@pytest.mark.parametrize("mode", ["GPU", "UVA"])
def test_a_missing_gpu_is_told(mode, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(DeviceError, match="asks for a GPU"):
        make_sampler(None, mode=mode)


def test_sampler_without_a_gpu_samples_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert make_sampler(None).device == torch.device("cpu")


@pytest.mark.slow
def test_many_batches_point_to_their_edges(device):
    graph = make_random_graph(3000, 30_000)
    sampler = make_sampler(device, (10, 5, 3), graph)

    for seeds in torch.arange(3000).split(512):
        n_id, _, adjs = sampler.sample(seeds)

        for adj in adjs:
            assert torch.equal(name_edges(n_id, adj).cpu(), graph.edge_index[:, adj.e_id.cpu()])
        assert n_id.unique().numel() == n_id.numel()
