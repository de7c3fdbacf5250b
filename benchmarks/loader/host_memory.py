"""Host memory of a loader while it places a graph, of the whole machine, as unified memory belongs to the driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch_geometric.data import Data

from pyg_direct.bench.result_row import Row
from pyg_direct.datasets import fill_features, synthetic_graph
from pyg_direct.loader.neighbor_loader import NeighborLoader


def used_bytes() -> int:
    """Return the host memory in use on this machine."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(lines["MemTotal"].split()[0]) - int(lines["MemAvailable"].split()[0])) * 1024


class PeakWatch:
    """Watch of the peak of host memory, sampled every few milliseconds."""

    def __enter__(self) -> PeakWatch:
        self.before = self.peak = used_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, used_bytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, used_bytes())


def measure_host_memory(
    num_nodes: int = 8_000_000, num_features: int = 256, num_edges: int = 64_000_000
) -> Iterator[Row]:
    """Measure the peak while features and topology on the host are placed in unified memory, over their size."""
    graph = synthetic_graph("products", num_nodes=num_nodes, num_edges=num_edges, topology_only=True, device="cuda")
    y = graph.y
    torch.ones(1, device="cuda")
    with PeakWatch() as watch:
        x = torch.empty(num_nodes, num_features)
        fill_features(x, y, seed=0, num_classes=graph.num_classes, feature_signal=1.0)
        data = Data(x=x, edge_index=graph.edge_index.cpu(), y=y.cpu())
        del x, graph, y
        begin = time.perf_counter()
        loader = NeighborLoader(data, [15, 10, 5], batch_size=1024, placement="unified")
        batch = next(iter(loader))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    assert batch.x.shape[1] == num_features
    topology = loader._sampled_topology
    held = sum(t.numel() * t.element_size() for t in (data.x, data.edge_index, data.y, topology.indices))
    case = f"memory/unified/{held / 1e9:.0f} GB"
    limit = held / 1e9
    yield Row.of(case, "peak host memory", "GB", [(watch.peak - watch.before) / 1e9], limit, "features and edges once",
                 "data.x, data.edge_index and the compressed neighbors")  # fmt: skip
    yield Row.of(case, "Data to first batch", "s", [seconds])
