"""Every case that a CPU can measure gives its rows, of graphs of a thousand nodes."""

import json
import time
from functools import partial

import pytest
import torch

from benchmarks import cases
from benchmarks.cases import LONG_CASES, SHORT_CASES
from benchmarks.distributed.dist_accuracy import measure_dist_accuracy
from benchmarks.dynamic import dynamic_cases
from benchmarks.dynamic.epochs import measure_dynamic_epochs
from benchmarks.dynamic.ways import WAYS
from benchmarks.loader import peers, startup, typed_batches
from benchmarks.nn import models, whole_graphs
from pyg_direct.datasets import synthetic_graph
from pyg_direct.datasets.dynamic_graphs import synthetic_dtdg
from pyg_direct.errors import DeviceError
from pyg_direct.loader.neighbor_loader import NeighborLoader

CASES = {**SHORT_CASES, **LONG_CASES}
SCALE = 0.0005
# Sizes that a case does not tell its measurements itself.
FEWER = {
    "measure_aggregation": {"widths": (8, 64)},
    "measure_types_on_cpu": {"size": 64},
    "measure_relations": {"batches": 3, "size": 100},
    "measure_times": {"batches": 2, "size": 8},
    "measure_typed_links": {"batches": 2, "size": 8},
    "measure_hgt": {"batches": 2, "size": 8},
    "measure_links": {"batches": 2, "size": 16},
    "measure_drift": {"num_batches": 60},
    "measure_accuracy": {"seeds": 1},
    "measure_loaders": {"size": 64},
    "measure_samplers_on_cpu": {"size": 64},
    "measure_continuous_time": {"steps": 3},
    "measure_small_graphs": {"sizes": (4,), "batches": 2},
    "measure_graph_training": {"size": 4, "steps": 2, "hidden": 4, "layers": 2, "warm": 1},
    "measure_unedited": {"names": ("gcn",), "epochs": 10, "turns": 1},
    "measure_accelerated_steps": {"hidden": 16},
    "measure_whole_graphs": {"hidden": 16, "repeats": 4},
}
# Rows that each must have.
EXPECTED = {
    "sampling": {"edges"},
    "loader": {"step, loader and compute", "Data to first batch"},
    "learned_rows": {"torch", "pyg_direct, CPU", "torch over pyg_direct, CPU"},
    "aggregate": {"fused", "PyG's scatter"},
    "models": {"PyG, wall", "accelerated, wall", "PyG over accelerated, wall", "step with loader, accelerated"},
    "whole_graphs": {"step, PyG", "step, accelerated", "inference, PyG over accelerated"},
    "unedited": {"epoch, plain", "epoch, run", "epoch, plain over run"},
    "inference": {"pyg_direct, rows on the host", "pyg_direct, rows in files"},
    "hetero": {"1 relations", "100 relations", "LinkNeighborLoader over NeighborLoader, 16 nodes"},
    "small_graphs": {"pyg_direct", "PyG's DataLoader, 0 workers", "PyG's DataLoader, 0 workers over pyg_direct"},
    "small_graph_training": {"step, pyg_direct", "step, PyG, 0 workers", "step, PyG's best over pyg_direct"},
    "sets_and_walks": {"pyg_direct", "PyG", "PyG over pyg_direct", "steps"},
    "continuous_time": {"step, pyg_direct", "step, PyG", "step, PyG over pyg_direct", "memory, pyg_direct"},
    "disk": {"rate", "rows of a batch", "step, features in host memory", "step, features in a file, 10 % in memory"},
    "hotness": {
        "hit rate by expectation",
        "hit rate by degree",
        "hit rate by follow_reads",
        "ranking by expected, of an epoch",
    },
    "labor": {"rows a batch"},
    "accuracy": {"test, 8 epochs", "test, 40 epochs", "GraphSAGE above it"},
    "peers": {"pyg_direct, 1 thread", "pyg_direct, 2 threads, a batch each"},
    "snapshots": {
        "one by one",
        "cuSPARSE, one by one",
        "best form, gathered",
        "best form, with ids",
        "best form, rows read",
    },
    "sweeps": {"rows of CSR over slices", "S=4, over ours one by one"},
    "dynamic_tuner": {"chosen groups over the best"},
    "dynamic_delta": {"what changed", "their union, sent"},
    "gated": {"torch's functions"},
}


def sample_small_batch(graph):
    return next(iter(NeighborLoader(graph.to_data(), [4, 3, 2], input_nodes=graph.train_idx, batch_size=64, seed=0)))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.delenv("PYG_DIRECT_DATA", raising=False)
    # Where there is a GPU, what a CPU measures is tested all the same.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(peers, "_WINDOW_SECONDS", 0.001)
    monkeypatch.setattr(whole_graphs, "_SECONDS", 0.0)
    monkeypatch.setattr(models, "_TURNS", 4)
    monkeypatch.setattr(models, "_WARM_UP", 1)
    monkeypatch.setattr(dynamic_cases, "PRESETS", dict(list(dynamic_cases.PRESETS.items())[:1]))
    monkeypatch.setattr(cases, "_sample_batch", sample_small_batch)
    for name, sizes in FEWER.items():
        monkeypatch.setattr(cases, name, partial(getattr(cases, name), **sizes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")
@pytest.mark.parametrize("name", EXPECTED)
def test_a_case_gives_its_rows(name):
    rows = list(CASES[name](SCALE))

    found = {row.metric.split(", fp32")[0] for row in rows}
    assert EXPECTED[name] <= found, sorted(found)
    assert len({(row.case, row.metric) for row in rows}) == len(rows), "a row is named twice"
    assert all(row.p20 <= row.p50 <= row.p80 for row in rows)


@pytest.mark.parametrize("name", ["gather", "unified", "power", "sampling_growth", "gather_growth", "multi_gpu",
                                  "multi_gpu_rows", "multi_gpu_papers", "link_share"])  # fmt: skip
def test_a_case_of_gpus_says_that_there_is_none(name):
    with pytest.raises(DeviceError, match=r"GPU|CUDA"):
        list(CASES[name](SCALE))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_processes_share_a_graph_and_its_rows(monkeypatch):
    monkeypatch.setattr(cases.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(cases, "measure_clients", lambda graph, name: iter(()))
    measure = cases.measure_distributed
    monkeypatch.setattr(cases, "measure_distributed", lambda *given: measure(*given[:3], [1, 2]))

    rows = {(row.case.rpartition("/")[2], row.metric): row for row in CASES["distributed"](2 * SCALE)}

    assert rows["2", "speed beside one process"].p50 > 0
    sent, least = rows["2", "row bytes sent a batch"], rows["2", "row bytes with copies of 20 %"]
    assert 0 < least.p50 < sent.p50
    planned = rows["2", "row bytes, rows of 16 batches known"]
    assert 0 < planned.p50 < planned.limit
    shared, copied = (
        rows["rows", f"rows in host memory, {way}"].p50 for way in ("rows shared out", "one copy that all share")
    )
    assert shared < 0.6 * copied


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_processes_learn_as_much_as_one(monkeypatch):
    monkeypatch.setattr("benchmarks.distributed.dist_accuracy.importlib.util.find_spec", lambda name: None)

    rows = {row.case.rpartition("/")[2]: row for row in measure_dist_accuracy(synthetic_graph("products", scale=SCALE),
                                                                              epochs=1, seeds=1)
            if row.unit == "%"}  # fmt: skip

    assert set(rows) == {"alone", "worker"}
    assert all(0 < row.p50 <= 100 for row in rows.values())


# Tells what it was told, in the place of what imports for seconds.
PROGRAM = """
import json, os, sys
print("imported", flush=True)
line = sys.stdin.readline()
if not line:
    sys.exit()
settings = json.loads(line)
os.makedirs(settings["PYG_DIRECT_CACHE"], exist_ok=True)
is_new = not os.listdir(settings["PYG_DIRECT_CACHE"])
open(os.path.join(settings["PYG_DIRECT_CACHE"], "kernel"), "w").close()
print(json.dumps([0.25, 20 if is_new else 1]))
"""


def test_a_first_batch_is_measured_with_nothing_compiled_and_with_all_kept(monkeypatch):
    monkeypatch.setattr(startup, "_PROGRAM", PROGRAM)

    rows = {row.metric + row.case.rpartition("/")[2]: row for row in CASES["startup"](SCALE)}

    assert rows["first batchnothing compiled"].p20 == 20
    assert rows["first batchall cached"].p80 == 1
    assert rows["import pyg_directimport"].p50 == 0.25


# It hears what it is told, or can hear nothing any more by then.
@pytest.mark.parametrize(("before", "after"), [("", "sys.stdin.readline(); "), ("os.close(0); ", "")])
def test_a_program_that_ends_without_a_batch_is_told_with_what_it_said(monkeypatch, before, after):
    monkeypatch.setattr(startup, "_PROGRAM", f"import os, sys; {before}print('imported', flush=True); {after}"
                                             "sys.exit('no such module')")  # fmt: skip

    with pytest.raises(RuntimeError, match=r"(?s)without a batch \(nothing compiled\).*no such module"):
        list(CASES["startup"](SCALE))


@pytest.fixture
def signals(monkeypatch):
    tiny = synthetic_dtdg(30, 120, 12, 0.1, weighted=True)
    monkeypatch.setattr(dynamic_cases, "_read_dynamic", lambda *names: {"tiny": tiny})
    monkeypatch.setattr(dynamic_cases, "measure_losses", partial(dynamic_cases.measure_losses, epochs=2))


@pytest.mark.slow
@pytest.mark.temporal
def test_every_way_to_train_a_dynamic_network_is_measured():
    ways = [way for way in WAYS if "compile" not in way]

    rows = list(measure_dynamic_epochs({"tiny": synthetic_dtdg(30, 120, 6, 0.1, weighted=True)}, ways=ways, window=3,
                                       hidden=4, epochs=1, device="cpu"))  # fmt: skip

    losses = {}
    for row in rows:
        if "loss of epoch 2 " in row.note:
            loss, _, apart = row.note.rpartition("loss of epoch 2 ")[2].partition(",")
            losses.setdefault(row.case, []).append(float(loss))
            assert not apart or float(apart.split()[0]) < 1e-4
    assert {len(found) for found in losses.values()} == {len(ways) + 2}
    assert all(max(found) < 1.0001 * min(found) for found in losses.values())


@pytest.mark.slow
@pytest.mark.temporal
@pytest.mark.parametrize("name", ["dynamic", "dynamic_losses", "dynamic_memory"])
def test_a_case_of_dynamic_networks_gives_its_rows(signals, name):
    assert {row.case.split("/")[1] for row in CASES[name](0.01)} >= {"tiny"}


@pytest.mark.slow
@pytest.mark.temporal
def test_dynamic_graphs_of_the_published_sizes_are_named_by_their_scale():
    rows = list(CASES["dynamic_large"](0.01))

    shapes = {f"generated, {name} x 0.0001" for name in dynamic_cases.PRESETS}
    assert {row.case.split("/")[1] for row in rows} == shapes
    assert {row.case.split("/")[2] for row in rows} == {"T-GCN", "EvolveGCN-O", "MPNN-LSTM"}
    assert all(row.p20 > 0 for row in rows if row.metric in ("PyGT", "PyGT over ours"))


def test_files_of_the_folder_of_data_are_read(monkeypatch, tmp_path):
    monkeypatch.setenv("PYG_DIRECT_DATA", str(tmp_path))
    values = [[float(10 * step + node) for node in range(3)] for step in range(12)]
    (tmp_path / "chickenpox.json").write_text(json.dumps({"FX": values, "edges": [[0, 1], [1, 2]]}))

    found = dynamic_cases._read_dynamic()

    assert set(found) == {"chickenpox"}
    assert found["chickenpox"][0].num_nodes == 3
    assert dynamic_cases._read_dynamic("graph.npz") == {}


def test_rows_that_stay_as_they_are_are_counted(signals):
    rows = {row.metric: row for row in CASES["dynamic_delta"](SCALE)}

    shares = [rows[f"rows unchanged, {operator}"] for operator in ("GCN", "Mean")]
    assert all(0 <= row.p20 <= row.p80 <= 1 for row in shares)
    assert all(0 <= rows[f"most that their reuse saves, {operator}"].p50 <= 100 for operator in ("GCN", "Mean"))


@pytest.mark.slow
def test_batches_around_papers_are_measured_one_by_one():
    rows = {row.metric: row for row in typed_batches.measure_types(SCALE, batches=3, sizes=(32,))}

    assert set(rows) == {"uniform", "disjoint", "weighted", "times", "times, last", "labor", "labor, times"}
    assert all(row.unit == "M/s" and row.p20 > 0 for row in rows.values())


@pytest.mark.slow
def test_a_peer_whose_workers_fail_is_left_out(monkeypatch):
    def open_peer(data, num_workers, **options):
        return iter(int, 1) if num_workers else NeighborLoader(data, **options)

    def count(batch):
        if batch == 0:
            raise RuntimeError("a worker ended")
        return real(batch)

    real = typed_batches._count_edges
    monkeypatch.setattr(typed_batches, "_count_edges", count)
    monkeypatch.setattr(typed_batches, "WITH_PYG_LIB", True)
    monkeypatch.setattr(typed_batches, "PygNeighborLoader", open_peer)

    with pytest.warns(UserWarning, match="with 2 workers: a worker ended"):
        rows = {row.metric: row for row in typed_batches.measure_times(SCALE, (0, 2), batches=2, size=8)}

    assert "PyG's loader, pyg-lib, 0 workers" in rows
    assert "PyG's loader, pyg-lib, 2 workers" not in rows
    assert rows["pyg_direct, super_batch=16 over PyG's loader at its best"].note == "0 workers, of 0, 2"


@pytest.mark.slow
def test_the_count_of_workers_that_is_the_best_is_told(monkeypatch):
    clock, slow_seconds = time.perf_counter, []

    class Slow(NeighborLoader):
        def __init__(self, data, num_workers, **options):
            super().__init__(data, **options)
            self.seconds = {0: 20.0, 1: 0.0, 4: 20.0}[num_workers]

        def __iter__(self):
            for batch in super().__iter__():
                slow_seconds.append(self.seconds)
                yield batch

    # Nobody waits for them.
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(slow_seconds))
    monkeypatch.setattr(typed_batches, "WITH_PYG_LIB", True)
    monkeypatch.setattr(typed_batches, "PygNeighborLoader", Slow)

    rows = {row.metric: row for row in typed_batches.measure_times(SCALE, (0, 1, 4), batches=2, size=8)}

    assert rows["pyg_direct, super_batch=16 over PyG's loader at its best"].note == "1 workers, of 0, 1, 4"
