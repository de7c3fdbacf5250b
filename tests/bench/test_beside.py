"""A contest counts the same work for all, and sets ours beside the best of the others."""

import pytest
import torch

from benchmarks.loader.peers import hold_contest
from pyg_direct import CSRTopo, NeighborLoader
from pyg_direct.bench import beside
from pyg_direct.bench.beside import WINDOWS, Contender, rows_of_contest

BATCHES = [torch.arange(10)] * 6


def contender(name: str, edges_a_seed: float, rates: tuple[float, ...] = ()) -> Contender:
    """One that finds so many edges a seed, or has been measured already."""
    made = Contender(name, lambda batches: int(edges_a_seed * sum(len(seeds) for seeds in batches)))
    made.rates, made.work = list(rates), [10 * edges_a_seed for _ in rates]
    return made


def test_every_contender_is_measured_in_every_window():
    contenders = [contender("pyg_direct", 5), contender("other 1.0", 5)]

    hold_contest(contenders, BATCHES)

    assert [len(c.rates) for c in contenders] == [WINDOWS, WINDOWS]
    assert all(edges == 50 for c in contenders for edges in c.work)


def test_ours_stands_over_the_fastest_of_the_others():
    contenders = [contender("pyg_direct", 5, (9e9, 8e9, 10e9)), contender("slow 1", 5, (1e9,)),
                  contender("fast 2", 5, (3e9, 2e9, 3e9))]  # fmt: skip

    rows = {row.metric: row for row in rows_of_contest("peers/x", contenders, "G/s")}

    assert rows["fast 2"].p50 == 3.0
    assert (rows["pyg_direct over the best peer"].p50, rows["pyg_direct over the best peer"].note) == (3.0, "fast 2")


def test_without_peers_there_is_nothing_to_stand_over():
    rows = list(rows_of_contest("peers/x", [contender("pyg_direct", 5, (1e9,))], "G/s"))

    assert [row.metric for row in rows] == ["pyg_direct"]


def test_other_work_is_refused():
    contenders = [contender("pyg_direct", 5, (1e9,)), contender("other 1.0", 6, (1e9,))]

    with pytest.raises(RuntimeError, match=r"other 1\.0 samples 60 edges a batch, pyg_direct 50"):
        list(rows_of_contest("peers/x", contenders, "G/s"))


def test_workers_of_pygs_loader_start_once(monkeypatch):
    given = []

    def make(data, **options):
        given.append([options.pop(name) for name in ("num_workers", "persistent_workers", "is_sorted")])
        return NeighborLoader(data, seed=0, **options)

    monkeypatch.setattr(beside, "PygNeighborLoader", make)
    monkeypatch.setattr(beside, "SAMPLER", "pyg-lib")
    topology = CSRTopo(torch.randint(500, (2, 30_000)), num_nodes=500)

    rows = list(beside.measure_loaders(topology, "tiny", (0, 2), size=64, batches=3))

    assert given == [[0, False, True], [2, True, True]]
    assert "PyG's loader, pyg-lib, 2 workers" in {row.metric for row in rows}
