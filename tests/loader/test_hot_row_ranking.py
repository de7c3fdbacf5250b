"""A loader finds out which rows it will read most, and its batches stay what they are."""

from functools import partial

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct import NeighborLoader, count_reads
from pyg_direct.errors import ArgumentError
from pyg_direct.features.hot_rows import choose_hottest
from pyg_direct.loader import hot_row_ranking as loader_ranking
from pyg_direct.loader.collate import attributes as placed_rows, data as pyg
from pyg_direct.loader.collate.data import Attributes, Ranking
from pyg_direct.loader.hot_row_ranking import rank_edges, rank_rows


def make_data(num_nodes=2000, num_edges=20_000):
    generator = torch.Generator().manual_seed(0)
    source = (torch.rand(num_edges, generator=generator) ** 3 * num_nodes).long()
    target = torch.randint(num_nodes, (num_edges,), generator=generator)
    return Data(x=torch.randn(num_nodes, 40, generator=generator), edge_index=torch.stack([source, target]))


def make_loader(data, device="cpu", fanouts=(5, 5), **options):
    options = {"batch_size": 50} | options
    return NeighborLoader(data, list(fanouts), torch.arange(0, 2000, 4), shuffle=True, seed=0,
                          device=device, **options)  # fmt: skip


@pytest.mark.parametrize("options", [{"hotness": "expected"}, {"hotness": "frequency", "presample": 20}], ids=str)
def test_scores_are_near_hindsight(options, monkeypatch):
    loader = make_loader(make_data(), **options)
    reads = count_reads((batch.n_id for _ in range(3) for batch in loader), 2000)
    # What is done for a GPU, by the CPU.
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    ranked = rank_rows(loader, loader._placed, loader._plan)

    best = reads.sort(descending=True).values[:400].sum()
    assert reads[choose_hottest(ranked.scores, 2000, 400).ids].sum() >= 0.97 * best


@pytest.mark.parametrize("fanouts", [(3,), (5, 5)])
def test_a_short_run_is_nearly_enough(fanouts, monkeypatch):
    loader = make_loader(make_data(), fanouts=fanouts, hotness="frequency", presample=0.05)
    reads = count_reads((batch.n_id for _ in range(10) for batch in loader), 2000)
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    scores = rank_rows(loader, loader._placed, loader._plan).scores

    best = reads.sort(descending=True).values[:400].sum()
    assert reads[choose_hottest(scores, 2000, 400).ids].sum() >= 0.97 * best


def count_sampled(loader, monkeypatch):
    """Batches that are sampled to rank rows, no two of them alike."""
    loader._prepare()
    seen = []
    sample = loader._plan.sample
    monkeypatch.setattr(loader._plan, "sample", lambda seeds, key: (seen.append(key), sample(seeds, key))[1])
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    rank_rows(loader, loader._placed, loader._plan)

    assert len(seen) == len(set(seen))
    return len(seen)


@pytest.mark.parametrize("presample", [0.1, 1, 2.5])
@pytest.mark.parametrize("options", [{}, {"replace": True}, {"sampling": "labor"}])
def test_so_many_batches_are_sampled(presample, options, monkeypatch):
    loader = make_loader(make_data(), hotness="frequency", presample=presample, **options)

    assert count_sampled(loader, monkeypatch) == 10 * presample


@pytest.mark.parametrize(("options", "expected"), [({}, 0), ({"replace": True}, 2), ({"sampling": "labor"}, 2)])
def test_nothing_is_sampled_where_the_chance_tells_all(options, expected, monkeypatch):
    # A twentieth of 50 batches.
    loader = make_loader(make_data(), hotness="frequency", **{"batch_size": 10} | options)

    assert count_sampled(loader, monkeypatch) == expected


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"sampling": "labor"}])
def test_by_default_frequency_is_near_hindsight_for_every_kind_of_draw(options, monkeypatch):
    loader = make_loader(make_data(), hotness="frequency", **options)
    reads = count_reads((batch.n_id for _ in range(10) for batch in loader), 2000)
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    scores = rank_rows(loader, loader._placed, loader._plan).scores

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
    monkeypatch.setattr(loader_ranking, "free_bytes", lambda index: 2 * 64 * 20_000)

    scores = rank_edges(loader, loader._placed).scores

    hottest = choose_hottest(scores, 20_000, 4000)
    counted = float(reads[hottest.ids].sum() / reads.sum())
    assert counted == pytest.approx(1 - hottest.misses, abs=0.01)
    assert float(reads.sum()) / 100 == pytest.approx(float(scores.sum()), rel=0.02)


@pytest.mark.parametrize("hotness", ["degree", "frequency"])
def test_edges_are_ranked_by_their_chance_alone(hotness, monkeypatch):
    loader = make_loader(make_data_with_rows_of_edges(), hotness=hotness)
    loader._prepare()
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))

    assert rank_edges(loader, loader._placed) is None


def test_edges_that_take_too_much_memory_to_rank_are_not(monkeypatch):
    loader = make_loader(make_data_with_rows_of_edges(), hotness="expected")
    loader._prepare()
    monkeypatch.setattr(loader, "device", torch.device("cuda", 0))
    monkeypatch.setattr(loader_ranking, "free_bytes", lambda index: 2 * 64 * 20_000 - 2)

    assert rank_edges(loader, loader._placed) is None


class Recorded:
    """Stands for a `Feature`, which caches nothing on a CPU."""

    def __init__(self, made, device_cache_size, csr_topo, **options):
        self.device_cache_size, self.scores = device_cache_size, csr_topo.scores
        made.append(self)

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
    monkeypatch.setattr(loader_ranking, "free_bytes", lambda index: 1 << 30)
    ranking, edges = rank_rows(loader, loader._placed, None), rank_edges(loader, loader._placed)
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

    feature = loader._attributes.describe()["edge_attr"]
    assert 0 < feature.num_hot_rows < 20_000
    assert "edge_attr" in str(loader.report())
    for got, wanted in zip(batches, expected, strict=True):
        assert torch.equal(got.x.cpu(), wanted.x)
        assert torch.equal(got.e_id.cpu(), wanted.e_id)
        assert torch.equal(got.edge_attr.cpu(), wanted.edge_attr)


def test_on_a_cpu_nothing_is_sampled_beforehand():
    loader = make_loader(make_data(), hotness="frequency")
    loader._prepare()

    assert isinstance(rank_rows(loader, loader._placed, None), Ranking)


@pytest.mark.gpu
@pytest.mark.parametrize("hotness", ["degree", "expected", "frequency"])
def test_batches_do_not_depend_on_what_is_hot(hotness):
    data = make_data()
    loader = make_loader(data, "cuda", hotness=hotness, placement="unified", feature_cache="20%")

    batches = list(loader)

    assert loader._attributes.describe()["x"].num_hot_rows == 400
    for got, expected in zip(batches, make_loader(make_data()), strict=True):
        assert torch.equal(got.n_id.cpu(), expected.n_id)
        assert torch.equal(got.x.cpu(), expected.x)


@pytest.mark.parametrize(("options", "words"), [
    ({"hotness": "speed"}, "hotness must be one of degree, frequency, expected, got 'speed'"),
    ({"presample": 0}, "presample must be a number of epochs above 0 and at most 1000, got 0"),
    ({"hotness": "frequency", "disjoint": True}, "hotness='frequency' needs a Data that is sampled uniformly"),
])  # fmt: skip
def test_what_makes_no_sense_is_named(options, words):
    with pytest.raises(ArgumentError, match=words):
        make_loader(make_data(), **options)
