"""A loader finds out which rows it will read most, and its batches stay what they are."""

from functools import partial

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import SamplerOutput

from pyg_direct import (
    HGTLoader,
    LinkLoader,
    LinkNeighborLoader,
    NeighborLoader,
    NodeLoader,
    SubGraphLoader,
    count_reads,
)
from pyg_direct.errors import ArgumentError
from pyg_direct.features import hot_rows
from pyg_direct.features.hot_rows import Ranked, choose_hottest
from pyg_direct.loader import hot_row_ranking as loader_ranking
from pyg_direct.loader.collate import attributes as placed_rows, data as pyg
from pyg_direct.loader.collate.data import Attributes, Ranking
from pyg_direct.loader.hot_row_ranking import rank_sampled
from pyg_direct.runtime.host.host_memory import parse_size
from pyg_direct.sampler import NeighborSampler

deprecated = pytest.mark.filterwarnings("ignore:hotness='frequency':DeprecationWarning")


def make_data(num_nodes=2000, num_edges=20_000):
    generator = torch.Generator().manual_seed(0)
    source = (torch.rand(num_edges, generator=generator) ** 3 * num_nodes).long()
    target = torch.randint(num_nodes, (num_edges,), generator=generator)
    return Data(x=torch.randn(num_nodes, 40, generator=generator), edge_index=torch.stack([source, target]))


def make_loader(data, device="cpu", fanouts=(5, 5), **options):
    options = {"batch_size": 50} | options
    return NeighborLoader(data, list(fanouts), torch.arange(0, 2000, 4), shuffle=True, seed=0,
                          device=device, **options)  # fmt: skip


def rank_nodes(loader):
    """Ranking before the first epoch."""
    loader._general = None
    return rank_sampled(loader, loader._sampled_topology).nodes[None]


def rank_edges(loader):
    return rank_sampled(loader, loader._sampled_topology).edges


@deprecated
@pytest.mark.parametrize("options", [{"hotness": "expected"}, {"hotness": "frequency", "presample": 20}], ids=str)
def test_scores_are_near_hindsight(options, monkeypatch):
    loader = make_loader(make_data(), **options)
    reads = count_reads((batch.n_id for _ in range(3) for batch in loader), 2000)
    # What is done for a GPU, by the CPU.
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    ranked = rank_nodes(loader)

    best = reads.sort(descending=True).values[:400].sum()
    assert reads[choose_hottest(ranked.scores, 2000, 400).ids].sum() >= 0.97 * best


@deprecated
@pytest.mark.parametrize("fanouts", [(3,), (5, 5)])
def test_a_short_run_is_nearly_enough(fanouts, monkeypatch):
    loader = make_loader(make_data(), fanouts=fanouts, hotness="frequency", presample=0.05)
    reads = count_reads((batch.n_id for _ in range(10) for batch in loader), 2000)
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    scores = rank_nodes(loader).scores

    best = reads.sort(descending=True).values[:400].sum()
    assert reads[choose_hottest(scores, 2000, 400).ids].sum() >= 0.97 * best


def count_sampled(loader, monkeypatch):
    """Batches that are sampled to rank rows, no two of them alike."""
    loader._prepare()
    seen = []
    sample = loader._plan.sample
    monkeypatch.setattr(loader._plan, "sample", lambda seeds, key: (seen.append(key), sample(seeds, key))[1])
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    rank_nodes(loader)

    assert len(seen) == len(set(seen))
    return len(seen)


@deprecated
@pytest.mark.parametrize("presample", [0.1, 1, 2.5])
@pytest.mark.parametrize("options", [{}, {"replace": True}, {"sampling": "labor"}])
def test_so_many_batches_are_sampled(presample, options, monkeypatch):
    loader = make_loader(make_data(), hotness="frequency", presample=presample, **options)

    assert count_sampled(loader, monkeypatch) == 10 * presample


@deprecated
@pytest.mark.parametrize(("options", "expected"), [({}, 0), ({"replace": True}, 2), ({"sampling": "labor"}, 2)])
def test_nothing_is_sampled_where_the_chance_tells_all(options, expected, monkeypatch):
    # A twentieth of 50 batches.
    loader = make_loader(make_data(), hotness="frequency", **{"batch_size": 10} | options)

    assert count_sampled(loader, monkeypatch) == expected


@deprecated
@pytest.mark.parametrize("hotness", ["expected", "frequency"])
@pytest.mark.parametrize("options", [{}, {"replace": True}, {"sampling": "labor"}])
def test_both_are_near_hindsight_for_every_kind_of_draw(options, hotness, monkeypatch):
    loader = make_loader(make_data(), hotness=hotness, **options)
    reads = count_reads((batch.n_id for _ in range(10) for batch in loader), 2000)
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    scores = rank_nodes(loader).scores

    best = reads.sort(descending=True).values[:400].sum()
    assert reads[choose_hottest(scores, 2000, 400).ids].sum() >= 0.97 * best


def make_data_with_rows_of_edges(width=10):
    data = make_data()
    data.edge_attr = torch.randn(data.num_edges, width, generator=torch.Generator().manual_seed(1))
    return data


def test_edges_are_read_as_often_as_expected(monkeypatch):
    loader = make_loader(make_data_with_rows_of_edges(), hotness="expected")
    reads = count_reads((batch.e_id for _ in range(10) for batch in loader), 20_000)
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))
    monkeypatch.setattr(loader_ranking, "available_bytes", lambda: 2 * 64 * 20_000)

    scores = rank_edges(loader).scores

    hottest = choose_hottest(scores, 20_000, 4000)
    counted = float(reads[hottest.ids].sum() / reads.sum())
    assert counted == pytest.approx(1 - hottest.misses, abs=0.01)
    assert float(reads.sum()) / 100 == pytest.approx(float(scores.sum()), rel=0.02)


@deprecated
@pytest.mark.parametrize("hotness", ["degree", "frequency"])
def test_edges_are_ranked_by_their_chance_alone(hotness, monkeypatch):
    loader = make_loader(make_data_with_rows_of_edges(), hotness=hotness)
    loader._prepare()
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    assert rank_edges(loader) is None


def test_edges_that_take_too_much_memory_to_rank_are_not(monkeypatch):
    loader = make_loader(make_data_with_rows_of_edges(), hotness="expected")
    loader._prepare()
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))
    monkeypatch.setattr(loader_ranking, "available_bytes", lambda: 2 * 64 * 20_000 - 2)

    assert rank_edges(loader) is None


class Recorded:
    """Stands for a `Feature`, which caches nothing on a CPU."""

    def __init__(self, made, device_cache_size, csr_topo, **options):
        self.device_cache_size, self._ranking = parse_size(device_cache_size), csr_topo
        made.append(self)

    @property
    def scores(self):
        return self._ranking.scores

    def from_cpu_tensor(self, tensor):
        self.row_bytes = tensor[0].numel() * 4

    def reads_in_place(self, table):
        return False


@pytest.mark.parametrize(("cache", "budget"), [("20%", 2000 * 32 + 20_000 * 8), (300_000, 300_000)])
def test_nodes_and_edges_share_one_cache(cache, budget, monkeypatch):
    data = make_data_with_rows_of_edges()
    loader = make_loader(data, hotness="expected")
    loader._prepare()
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))
    monkeypatch.setattr(loader_ranking, "available_bytes", lambda: 1 << 30)
    ranking, edges = rank_nodes(loader), rank_edges(loader)
    made = []
    monkeypatch.setattr(placed_rows, "Feature", partial(Recorded, made))
    monkeypatch.setattr(placed_rows, "budget_of", lambda free: 0)
    monkeypatch.setattr(placed_rows, "free_bytes", lambda index: 0)
    monkeypatch.setattr(pyg, "group_narrow", lambda features: [])

    Attributes(data, ranking, torch.device("cuda", 0), "unified", cache, edges=edges)

    hot = {len(one.scores): one for one in made}
    sizes = {rows: one.device_cache_size for rows, one in hot.items()}
    assert budget - 160 < sum(sizes.values()) <= budget
    # The worst row that is hot is read at least as often for its bytes as the best one that is not.
    ranked = [((one.scores / one.row_bytes).sort(descending=True).values, sizes[rows] // one.row_bytes)
              for rows, one in hot.items()]  # fmt: skip
    assert all(0 < count < len(densities) for densities, count in ranked)
    assert min(densities[count - 1] for densities, count in ranked) >= max(
        densities[count] for densities, count in ranked)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"placement": "unified", "feature_cache": "20%"},
                                     {"placement": "pinned", "feature_cache": 500_000},
                                     {"placement": "unified", "feature_cache": "20%", "super_batch": 4}])  # fmt: skip
def test_batches_are_the_same_with_hot_rows_of_edges(options):
    data = make_data_with_rows_of_edges()
    expected = list(make_loader(make_data_with_rows_of_edges()))
    loader = make_loader(data, "cuda", hotness="expected", **options)
    loader.record()

    batches = list(loader)

    feature = loader._general.describe()["edge_attr"]
    assert 0 < feature.num_hot_rows < 20_000
    assert "edge_attr" in str(loader.report())
    for got, wanted in zip(batches, expected, strict=True):
        assert torch.equal(got.x.cpu(), wanted.x)
        assert torch.equal(got.e_id.cpu(), wanted.e_id)
        assert torch.equal(got.edge_attr.cpu(), wanted.edge_attr)


@deprecated
def test_on_a_cpu_nothing_is_sampled_beforehand():
    loader = make_loader(make_data(), hotness="frequency")
    loader._prepare()

    assert isinstance(rank_nodes(loader), Ranking)


@deprecated
@pytest.mark.gpu
@pytest.mark.parametrize("hotness", ["degree", "expected", "frequency"])
def test_batches_do_not_depend_on_what_is_hot(hotness):
    data = make_data()
    loader = make_loader(data, "cuda", hotness=hotness, placement="unified", feature_cache="20%")

    batches = list(loader)

    assert loader._general.describe()["x"].num_hot_rows == 400
    for got, expected in zip(batches, make_loader(make_data()), strict=True):
        assert torch.equal(got.n_id.cpu(), expected.n_id)
        assert torch.equal(got.x.cpu(), expected.x)


@deprecated
@pytest.mark.parametrize(("options", "words"), [
    ({"hotness": "speed"}, "hotness must be one of degree, frequency, expected, got 'speed'"),
    ({"presample": 0}, "presample must be a number of epochs above 0 and at most 1000, got 0"),
    ({"hotness": "frequency", "disjoint": True}, "hotness='frequency' needs a Data that is sampled uniformly"),
])  # fmt: skip
def test_what_makes_no_sense_is_named(options, words):
    with pytest.raises(ArgumentError, match=words):
        make_loader(make_data(), **options)


def test_expected_reads_are_the_default(monkeypatch):
    loader, given = make_loader(make_data()), make_loader(make_data(), hotness="expected")
    for one in (loader, given):
        one._prepare()
        monkeypatch.setattr(one, "device", torch.device("cuda", 0))

    ranked, wanted = (rank_nodes(one) for one in (loader, given))

    assert isinstance(ranked, Ranked)
    assert torch.equal(ranked.scores, wanted.scores)


@pytest.mark.parametrize("words", [{"hotness": "frequency"}, {"hotness": "frequency", "presample": 0.5}], ids=str)
def test_frequency_is_deprecated(words):
    with pytest.warns(DeprecationWarning, match="hotness='frequency' and presample are deprecated .* use hotness='exp"):
        make_loader(make_data(), **words)


def near_hindsight(scores, reads):
    """Whether a fifth of the rows, chosen by scores, serves nearly as many reads as can be."""
    count = len(reads) // 5
    return reads[choose_hottest(scores, len(reads), count).ids].sum() >= 0.95 * reads.sort().values[-count:].sum()


def of_sampler(data, **options):
    return NodeLoader(data, NeighborSampler(data, [5, 5], device="cpu"), torch.arange(0, 2000, 4), **options)


def around_links(data, **options):
    return LinkNeighborLoader(data, [5, 5], data.edge_index[:, ::50].contiguous(), **options)


def around_links_of_sampler(data, **options):
    sampler = NeighborSampler(data, [5, 5], device="cpu", sample_direction="backward")
    return LinkLoader(data, sampler, data.edge_index[:, ::50].contiguous(), **options)


WEIGHT = torch.arange(2000) + 1.0
WAYS = {
    "disjoint": lambda data, **options: NeighborLoader(data, [5, 5], torch.arange(0, 2000, 4), disjoint=True,
                                                       hotness="expected", **options),
    "replace": lambda data, **options: NeighborLoader(data, [2, 2], torch.arange(0, 2000, 4), replace=True,
                                                      subgraph_type="bidirectional", **options),
    "induced": lambda data, **options: SubGraphLoader(data, torch.arange(0, 2000, 4), [5, 5], **options),
    "sampler": of_sampler,
    "links": around_links,
    "links, backward": around_links_of_sampler,
    "binary": partial(around_links, neg_sampling="binary"),
    "triplets": partial(around_links, neg_sampling="triplet"),
    "weighted": partial(around_links, neg_sampling={"mode": "binary", "amount": 3, "src_weight": WEIGHT,
                                                    "dst_weight": WEIGHT}),
    "excluded": partial(around_links, exclude_target_edges=True),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_chances_are_computed_for_every_loader_whose_sampler_is_ours(way, monkeypatch):
    loader = WAYS[way](make_data(), batch_size=50, shuffle=True, seed=0, device="cpu")
    reads = count_reads((batch.n_id for _ in range(10) for batch in loader), 2000)
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    ranked = rank_sampled(loader, loader._sampled_topology).nodes[None]

    assert isinstance(ranked, Ranked)
    assert near_hindsight(ranked.scores, reads)
    # A disjoint batch reads a node for each of its trees.
    if way != "disjoint":
        assert float(reads.sum()) / (10 * len(loader)) == pytest.approx(float(ranked.scores.sum()), rel=0.06)


@pytest.mark.parametrize("negatives", [None, "binary"])
def test_edges_around_links_are_read_as_often_as_expected(negatives, monkeypatch):
    loader = around_links(
        make_data_with_rows_of_edges(), neg_sampling=negatives, batch_size=50, shuffle=True, seed=0, device="cpu"
    )
    reads = count_reads((batch.e_id for _ in range(5) for batch in loader), 20_000)
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    edges = rank_sampled(loader, loader._sampled_topology).edges

    hottest = choose_hottest(edges.scores, 20_000, 4000)
    counted = float(reads[hottest.ids].sum() / reads.sum())
    assert counted == pytest.approx(1 - hottest.misses, abs=0.01)
    assert float(reads.sum()) / (5 * len(loader)) == pytest.approx(float(edges.scores.sum()), rel=0.06)


def make_typed_data():
    data, plain = HeteroData(), make_data()
    source, target = plain.edge_index
    data["paper"].x, data["author"].x = plain.x, plain.x[:1000].clone()
    data["author", "writes", "paper"].edge_index = torch.stack([source // 2, target])
    data["paper", "by", "author"].edge_index = torch.stack([source, target // 2])
    data["paper", "cites", "paper"].edge_index = plain.edge_index.flip(1)
    return data


def make_typed_loader(data, **options):
    fanouts = {edge_type: [4, 4] for edge_type in data.edge_types} | {("paper", "cites", "paper"): [-1, 2]}
    return NeighborLoader(data, fanouts, ("paper", torch.arange(0, 2000, 10)), batch_size=20, shuffle=True, seed=0,
                          **{"device": "cpu"} | options)  # fmt: skip


def test_chances_of_each_type_are_computed(monkeypatch):
    loader = make_typed_loader(make_typed_data())
    batches = [batch for _ in range(5) for batch in loader]
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    nodes = rank_sampled(loader, loader._sampled_topology).nodes

    for kind, count in (("paper", 2000), ("author", 1000)):
        reads = count_reads((batch[kind].n_id for batch in batches), count)
        assert near_hindsight(nodes[kind].scores, reads)
        assert float(reads.sum()) / len(batches) == pytest.approx(float(nodes[kind].scores.sum()), rel=0.06)


class Own(NeighborSampler):
    """A program's sampler, whose reads are not known."""

    def sample_from_nodes(self, index, **options):
        return super().sample_from_nodes(index, **options)


def make_timed():
    data = make_data()
    data.time = torch.arange(2000)
    data.weight = torch.rand(data.num_edges)
    return data


SEEDS = torch.arange(0, 2000, 4)
FALL_BACK = {
    "times": lambda: NeighborLoader(make_timed(), [5, 5], SEEDS, time_attr="time", device="cpu"),
    "weights": lambda: NeighborLoader(make_timed(), [5, 5], SEEDS, weight_attr="weight", device="cpu"),
    "own": lambda: NodeLoader(data := make_data(), Own(data, [5, 5], device="cpu"), SEEDS, device="cpu"),
    "hgt": lambda: HGTLoader(make_typed_data(), [8, 8], ("paper", SEEDS), device="cpu"),
    "degree": lambda: make_loader(make_data(), hotness="degree", disjoint=True),
}


@pytest.mark.parametrize("way", FALL_BACK)
def test_where_chances_are_not_known_degrees_rank_rows(way, monkeypatch):
    loader = FALL_BACK[way]()
    loader._prepare()
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    rankings = rank_sampled(loader, loader._sampled_topology)

    assert rankings.nodes
    assert rankings.edges is None
    assert not any(isinstance(one, Ranked) for one in rankings.nodes.values())


def test_of_a_sampler_that_is_not_ours_nothing_is_known():
    assert rank_sampled(make_loader(make_data(), disjoint=True), None) == ({}, None)


def test_a_sampler_that_a_program_put_in_place_of_ours_leaves_degrees(monkeypatch):
    loader = make_loader(make_data_with_rows_of_edges())
    loader._prepare()
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))
    monkeypatch.setattr(loader.node_sampler, "sample_from_nodes", lambda index: SamplerOutput(None, None, None, None),
                        raising=False)  # fmt: skip

    assert isinstance(rank_nodes(loader), Ranking)
    assert rank_edges(loader) is None


def refuse(*args, **options):
    raise AssertionError("chances were computed")


@pytest.mark.parametrize("make", [make_loader, make_typed_loader, *WAYS.values()])
def test_on_a_cpu_no_chance_is_computed(make, monkeypatch):
    data = make_typed_data() if make is make_typed_loader else make_data_with_rows_of_edges()
    monkeypatch.setattr(loader_ranking, "follow_chances", refuse)
    monkeypatch.setattr(hot_rows, "follow_chances", refuse)
    options = {} if make in (make_loader, make_typed_loader) else {"device": "cpu"}

    loader = make(data, feature_cache="20%", **options)

    assert next(iter(loader)) is not None


def test_chances_are_computed_once_and_anew_for_other_fanouts(monkeypatch):
    loader = make_loader(make_data_with_rows_of_edges())
    loader._prepare()
    made, follow = [], loader_ranking.follow_chances
    monkeypatch.setattr(loader_ranking, "follow_chances", lambda *args: (made.append(1), follow(*args))[1])
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    first = rank_nodes(loader).scores
    again = rank_nodes(loader).scores
    _ = rank_edges(loader).scores
    loader.node_sampler.num_neighbors = [1]
    other = rank_nodes(loader).scores

    assert len(made) == 2
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("cache", [None, 0, "100%"])
def test_no_chance_is_computed_where_no_row_or_all_rows_are_cached(cache, monkeypatch):
    data = make_data_with_rows_of_edges()
    loader = make_loader(data)
    loader._prepare()
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))
    ranking, edges = rank_nodes(loader), rank_edges(loader)
    monkeypatch.setattr(loader_ranking, "follow_chances", refuse)
    made = []
    monkeypatch.setattr(placed_rows, "Feature", partial(Recorded, made))
    monkeypatch.setattr(placed_rows, "budget_of", lambda free: 0)
    monkeypatch.setattr(placed_rows, "free_bytes", lambda index: 0)
    monkeypatch.setattr(pyg, "group_narrow", lambda features: [])

    Attributes(data, ranking, torch.device("cuda", 0), "unified", cache, edges=edges)

    whole = {"100%": [2000 * 160, 20_000 * 40]}.get(cache, [0, 0])
    assert [one.device_cache_size for one in made] == whole


@deprecated
@pytest.mark.parametrize("hotness", ["degree", "expected", "frequency"])
def test_hotness_takes_no_random_number(hotness):
    expected = make_loader(make_data())
    torch.manual_seed(3)
    loader = NeighborLoader(make_data(), [5, 5], SEEDS, batch_size=50, shuffle=True, device="cpu", hotness=hotness)
    got = [batch.n_id for batch in loader]
    torch.manual_seed(3)
    wanted = [batch.n_id for batch in NeighborLoader(make_data(), [5, 5], SEEDS, batch_size=50, shuffle=True,
                                                     device="cpu")]  # fmt: skip

    assert all(map(torch.equal, got, wanted))
    assert all(torch.equal(one.n_id, other.n_id)
               for one, other in zip(make_loader(make_data(), hotness=hotness), expected, strict=True))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("make", [make_typed_loader, around_links, WAYS["disjoint"]])
def test_batches_of_all_loaders_do_not_depend_on_what_is_hot(make):
    def read(device, **options):
        data = make_typed_data() if make is make_typed_loader else make_data_with_rows_of_edges()
        options = options if make is make_typed_loader else {"batch_size": 50, "seed": 0, **options}
        batches = list(make(data, **{"device": device, **options}))
        parts = [[part.to_dict() for part in batch.stores] for batch in batches]
        return [[value.cpu() for part in own for value in part.values() if isinstance(value, torch.Tensor)]
                for own in parts]  # fmt: skip

    for got, wanted in zip(read("cuda", placement="unified", feature_cache="20%"), read("cpu"), strict=True):
        assert len(got) == len(wanted)
        assert all(map(torch.equal, got, wanted))
