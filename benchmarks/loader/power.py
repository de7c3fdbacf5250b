"""Cost of training for the machine: time of a step, share of the CPU cores, and power of the GPU, reported by NVML.

This is the power of the GPU only; PyTorch-Direct's authors measured the whole machine at the wall.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GAT, GraphSAGE

from pyg_direct.bench.result_row import Row
from pyg_direct.features.feature import Feature
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.sampling.graphsage_sampler import GraphSageSampler

_FANOUTS = (10, 5)
_PERIOD_MS = 50


class PowerMeter:
    """Sampler of the power of a GPU while it is open, by `nvidia-smi`, which reads NVML.

    Attributes:
        watts: The samples.
    """

    def __init__(self, index: int = 0) -> None:
        self.watts: list[float] = []
        self._command = ["nvidia-smi", f"--id={index}", "--query-gpu=power.draw", "--format=csv,noheader,nounits",
                         f"--loop-ms={_PERIOD_MS}"]  # fmt: skip

    def __enter__(self) -> PowerMeter:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        lines = self._process.communicate()[0].splitlines()
        self.watts = [float(line) for line in lines if line.strip().replace(".", "", 1).isdigit()]


def measure_training(x: Tensor, y: Tensor, topology: CSRTopo, train_idx: Tensor, name: str, steps: int = 150,
                     batch_size: int = 1024) -> Iterator[Row]:  # fmt: skip
    """Measure steps of GraphSAGE and GAT with features read from host memory in three ways, one batch after the
    other.
    """
    import psutil

    sampler = GraphSageSampler(topology, list(_FANOUTS), seed=0)
    y, num_classes = y.cuda(), int(y.max()) + 1
    seeds = [part for part in train_idx[torch.randperm(len(train_idx))].split(batch_size) if len(part) == batch_size]
    plain = x.clone()
    unified = Feature().from_cpu_tensor(x)
    cached = Feature(device_cache_size="20%", csr_topo=topology).from_cpu_tensor(x)
    fetchers: dict[str, Callable[[Tensor], Tensor]] = {
        "baseline: torch on the CPU": lambda n_id: plain[n_id.cpu()].cuda(), "unified": unified.read,
        "unified, 20 % cached": cached.read}  # fmt: skip
    for model_name, make in (("GraphSAGE", GraphSAGE), ("GAT", GAT)):
        for way, fetch in fetchers.items():
            model = make(x.shape[1], 256, len(_FANOUTS), num_classes).cuda()
            optimizer = torch.optim.Adam(model.parameters())

            def step(part: Tensor, fetch: Any = fetch, model: Any = model, optimizer: Any = optimizer) -> None:
                n_id, size, adjs = sampler.sample(part)
                edge_index = torch.cat([adj.edge_index for adj in reversed(adjs)], 1)
                optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(model(fetch(n_id), edge_index)[:size], y[n_id[:size]].long()).backward()
                optimizer.step()

            for part in seeds[:8]:
                step(part)
            torch.cuda.synchronize()
            psutil.cpu_percent()
            meter = PowerMeter() if shutil.which("nvidia-smi") else None
            with meter or _Nothing():
                begin = time.perf_counter()
                for part in islice(cycle(seeds), steps):
                    step(part)
                torch.cuda.synchronize()
                seconds = (time.perf_counter() - begin) / steps
                cores = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
            case = f"training/{name}/{model_name}"
            yield Row.of(case, way, "ms", [1e3 * seconds], note=f"mean of {steps} steps, nothing made ahead")
            yield Row.of(case, f"CPU cores busy, {way}", "cores", [cores])
            if meter is not None and meter.watts:
                yield Row.of(case, f"GPU power, {way}", "W", meter.watts, note="of the GPU alone, by NVML")
                energy = median(meter.watts) * seconds
                yield Row.of(case, f"GPU energy of a step, {way}", "J", [energy])


class _Nothing:
    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""
