"""What epochs of models are measured against."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from benchmarks.features.link_share import SHARES, measure_link_share
from benchmarks.loader.typed_graphs import make_mag
from benchmarks.nn.models import count_host_bytes, measure_pyg_epochs
from benchmarks.nn.rgat import count_work, measure_rgat, measure_rgat_accuracy, measure_rgat_on_host
from benchmarks.nn.typed_steps import measure_typed_steps
from pyg_direct.datasets import synthetic_graph
from pyg_direct.loader.neighbor_loader import NeighborLoader


@pytest.mark.parametrize(("placement", "cache", "least", "most"),
                         [("cpu", None, 1, 1),
                          pytest.param("unified", None, 1, 1, marks=pytest.mark.gpu),
                          pytest.param("unified", "20%", 0.05, 0.95, marks=pytest.mark.gpu),
                          pytest.param("cuda", None, 0, 0, marks=pytest.mark.gpu)])  # fmt: skip
def test_bytes_of_rows_on_the_host_are_counted(placement, cache, least, most):
    data = Data(x=torch.rand(500, 16), edge_index=torch.randint(0, 500, (2, 5000)))
    loader = NeighborLoader(data, [5, 5], torch.arange(100), batch_size=50, placement=placement, feature_cache=cache)
    batch = next(iter(loader))

    found = count_host_bytes(loader, batch, 6) / (batch.x.numel() * 4)

    assert least <= found <= most


@pytest.mark.full
def test_steps_over_types_are_measured(real_device):
    rows = list(measure_typed_steps(make_mag(0.0005, real_device, num_features=16), "paper", "tiny", batches=6))

    ways = ["PyG's kernels", "accelerated"]
    ways += ["accelerated, replayed", "accelerated, model replayed"] if torch.cuda.is_available() else []
    assert [row.metric for row in rows] == 2 * (
        [f"step with loader, {way}" for way in ways] + [f"PyG's kernels over {way}" for way in ways[1:]])  # fmt: skip
    assert {row.case for row in rows} == {"models/tiny/HeteroConv epoch", "models/tiny/HeteroConv of GAT epoch"}
    assert all(row.p50 > 0 for row in rows)


@pytest.mark.full
def test_steps_of_rgat_are_measured(real_device):
    rows = list(measure_rgat(1e-5, "tiny", sizes=(32,), batches=6, plain_sizes=(32,)))

    found = {row.metric: row.p50 for row in rows}
    assert {"nodes a seed", "edges a seed", "PyG's kernels", "accelerated"} <= found.keys()
    assert all(value > 0 for value in found.values())
    assert real_device.type == "cpu" or found["accelerated, peak memory"] > 0


@pytest.mark.full
def test_work_of_rgat_is_counted_by_layer():
    batch = HeteroData()
    batch["paper"].x, batch["author"].x = torch.rand(4, 8), torch.rand(3, 8)
    # One seed cites papers 1 and 2; authors 0 and 1 wrote it. In the second hop author 2 wrote paper 1, which cites 3.
    batch["paper", "cites", "paper"].edge_index = torch.tensor([[1, 2, 3], [0, 0, 1]])
    batch["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 2], [0, 0, 1]])
    batch["paper", "of", "author"].edge_index = torch.empty(2, 0, dtype=torch.long)
    batch.num_sampled_nodes_dict = {"paper": [1, 2, 1], "author": [0, 2, 1]}
    batch.num_sampled_edges_dict = {kind: [0, 0] if kind[1] == "of" else [2, 1] for kind in batch.edge_types}
    width, hidden = 8, 16

    operations, num_bytes = count_work(batch, hidden, 2)

    # Sources of the first layer: papers 1, 2, 3 and authors 0, 1, 2; of the second: papers 1, 2 and authors 0, 1.
    assert operations == 2 * 2 * 6 * width * hidden + 3 * 2 * 4 * hidden * hidden
    first = 4 * 6 * width + 10 * 6 * hidden + 8 * 2 * hidden
    assert num_bytes == first + (4 * 4 * hidden + 10 * 4 * hidden + 8 * 1 * hidden + 4 * 4 * hidden)


def test_accuracy_of_rgat_is_measured_in_both_ways(real_device):
    rows = list(measure_rgat_accuracy(1e-4, "tiny", seeds=2, batches=12, size=32, num_classes=3, feature_signal=4.0))

    assert [row.metric for row in rows] == ["accuracy, PyG's kernels", "accuracy, accelerated"]
    # One of three classes is right by chance.
    assert all(40 < row.p50 <= 100 for row in rows)


@pytest.mark.full
def test_rgat_over_rows_on_the_host_is_measured_beside_rows_on_the_gpu(real_device):
    rows = list(measure_rgat_on_host(1e-5, "tiny", size=32, batches=6, warm_up=2))

    assert [row.metric for row in rows] == ["rows in GPU memory", "rows in host memory, 20% cached",
                                            "rows in host memory over rows in GPU memory, seeds/s"]  # fmt: skip
    assert all(row.p50 > 0 for row in rows)


@pytest.mark.gpu
def test_what_reads_take_from_a_step_is_measured():
    graph = synthetic_graph("products", scale=0.02, device="cpu")

    rows = list(measure_link_share(graph.to_data(), graph.train_idx, graph.num_classes, "tiny", batches=12))

    blocks = [row.case.rpartition("/")[2] for row in rows if row.metric == "step with loader, replayed"]
    assert len(blocks) == len(SHARES)
    assert len(rows) == 1 + 3 * len(SHARES)
    assert all(row.p50 > 0 for row in rows)


@pytest.mark.sparse
def test_pygs_own_loader_trains_too(monkeypatch):
    pytest.importorskip("torch_sparse")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    graph = synthetic_graph("products", scale=0.001, device="cpu")

    found = measure_pyg_epochs(graph.to_data(), graph.train_idx, graph.num_classes, turns=3)

    (times,) = found.values()
    assert len(times) == 2
    assert all(time > 0 for time in times)
