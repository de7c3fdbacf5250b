"""Rows of sampling by several at once."""

import pytest
import torch

from benchmarks.loader import mixed
from benchmarks.loader.mixed import RandomSeeds, measure_mixed
from pyg_direct.datasets import synthetic_graph


def test_each_way_has_a_row_of_all_its_epochs(monkeypatch):
    graph = synthetic_graph("products", scale=0.001, topology_only=True, device="cpu")
    monkeypatch.setattr(mixed, "_EPOCHS", 2)
    monkeypatch.setattr(mixed, "_FIRST", 2)

    rows = list(measure_mixed(graph.edge_index, graph.num_nodes, "tiny", (1, 2), 4, 6))

    on_cpu = [f"mixed/tiny/CPU_ONLY/{count} cores" for count in (1, 2)]
    on_gpu = [f"mixed/tiny/{place}_{kind} cores" for place in ("GPU", "UVA")
              for kind in ("ONLY/0", "CPU_MIXED/1", "CPU_MIXED/2")] if torch.cuda.is_available() else []  # fmt: skip
    assert sorted(row.case for row in rows) == sorted([*on_cpu, *on_gpu])
    for row in rows:
        assert row.p50 > 0
        assert (row.limit is not None) == ("MIXED" in row.case)
        assert "CPU_ONLY" not in row.case or "cores sampled 100%" in row.note
        assert "GPU_ONLY" not in row.case or "cores sampled 0%" in row.note


def test_rates_are_those_of_the_edges(monkeypatch):
    graph = synthetic_graph("products", scale=0.001, topology_only=True, device="cpu")
    ticks = iter(range(1000))
    monkeypatch.setattr(mixed.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(mixed, "_EPOCHS", 1)
    monkeypatch.setattr(mixed, "_FIRST", 2)
    monkeypatch.setattr(mixed, "MixedGraphSageSampler", FourEdges)

    (row,) = (r for r in measure_mixed(graph.edge_index, graph.num_nodes, "tiny", (1,), 3, 3) if "CPU" in r.case)

    # Two batches of four edges, one second by the clock above.
    assert row.p50 == pytest.approx(8e-6)


class FourEdges:
    num_on_cores, num_on_gpu = 3, 0

    def __init__(self, job, num_workers, topology, sizes, *, mode, seed):
        assert len(job) == 3
        assert job[0].tolist() == RandomSeeds(topology.node_count, 3)[0].tolist()

    def __iter__(self):
        edges = type("Adj", (), {"e_id": torch.zeros(4)})
        return iter([(None, 1, [edges]), (None, 1, [edges])])
