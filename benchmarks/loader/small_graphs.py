"""Batches of many small graphs of ZINC's shape, ours beside PyG's `DataLoader`: milliseconds per batch, and memory.

Also milliseconds per training step of GIN and GINE on them.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader as PygDataLoader
from torch_geometric.nn import MLP, GINConv, GINEConv, global_add_pool

from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.loader.data_loader import DataLoader
from pyg_direct.nn.accelerate import accelerate
from pyg_direct.runtime.cuda.device import resolve_device

WINDOWS = 7
# Steps before the timed ones: passes are recorded after some, and again for larger batches.
_WARM_STEPS = 60
# Seconds before the timed batches: on a CPU, compiled loops join batches after torch has done so for half a second.
_WARM = 2.0


class _Molecules(InMemoryDataset):
    """Graphs of about 23 nodes and 50 edges, as ZINC's: `x` [N, 1], `edge_attr` [E], `y` [1]."""

    def __init__(self, count: int) -> None:
        super().__init__(None)
        generator = torch.Generator().manual_seed(0)

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        graphs = []
        for nodes, edges in zip(draw(14, 33, count).tolist(), draw(30, 71, count).tolist(), strict=True):
            graphs.append(Data(x=draw(0, 28, nodes, 1), edge_index=draw(0, nodes, 2, edges),
                               edge_attr=draw(1, 4, edges), y=torch.rand(1, generator=generator)))  # fmt: skip
        self.data, self.slices = self.collate(graphs)


def measure_small_graphs(scale: float, sizes: Sequence[int] = (128, 1024), batches: int = 40,
                         workers: Sequence[int] = (0,)) -> Iterator[Row]:  # fmt: skip
    """Measure a batch of the data set in memory, of a list of its graphs, which are views of joined tensors, and of
    separate graphs with tensors of their own; on one CPU thread, or on a GPU with torch's default threads.
    """
    device = resolve_device(None)
    dataset = _Molecules(max(4, int(12_000 * scale)))
    views = [dataset[number] for number in range(len(dataset))]
    forms = {"in memory": dataset, "list": views, "separate": [graph.clone() for graph in views]}
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        for form, graphs in forms.items():
            for size in sizes:
                yield from _measure_form(f"small graphs/{device.type}/{form}/{size}", graphs, size, batches,
                                         workers if form == "in memory" else (0,), device)  # fmt: skip
        if device.type == "cpu":
            yield from _measure_memory(max(4, int(60_000 * scale)), sizes[0])
    finally:
        torch.set_num_threads(before)


def _measure_form(case: str, graphs: Any, size: int, batches: int, workers: Sequence[int], device: torch.device
                  ) -> Iterator[Row]:  # fmt: skip
    options: dict[str, Any] = {"batch_size": min(size, len(graphs)), "shuffle": True, "drop_last": True}
    loaders: dict[str, Any] = {"pyg_direct": DataLoader(graphs, device=device, seed=0, **options)}
    for count in workers:
        name = f"PyG's DataLoader, {count} workers"
        loaders[name] = PygDataLoader(graphs, num_workers=count, persistent_workers=count > 0, **options)
    epochs = {name: chain.from_iterable(repeat(loader)) for name, loader in loaders.items()}
    # PyG caches each graph of a data set in memory: one epoch runs before the timed ones.
    for name, loader in loaders.items():
        begin = time.perf_counter()
        _time(epochs[name], len(loader), device)
        while name == "pyg_direct" and time.perf_counter() - begin < _WARM:
            _time(epochs[name], batches, device)
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(WINDOWS):
        for name in loaders:
            seconds[name].append(_time(epochs[name], batches, device))
    limit = _time_copies(next(epochs["pyg_direct"]), batches, device)
    for name, times in seconds.items():
        yield Row.of(case, name, "ms", [1e3 * each for each in times], 1e3 * limit, "a copy of the batch's tensors")
    ours = seconds.pop("pyg_direct")
    for name, times in seconds.items():
        ratios = [theirs / own for theirs, own in zip(times, ours, strict=True)]
        yield Row.of(case, f"{name} over pyg_direct", "x", ratios, note="of times side by side")


class _Network(torch.nn.Module):
    """GIN, or GINE with embeddings of bonds, with a prediction for each graph, as PyG's examples have it."""

    def __init__(self, kind: str, hidden: int, layers: int) -> None:
        super().__init__()
        self.atoms = torch.nn.Embedding(28, hidden)
        self.bonds = torch.nn.Embedding(4, hidden) if kind == "GINE" else None
        conv: Callable[[MLP], torch.nn.Module] = GINEConv if kind == "GINE" else GINConv
        self.convs = torch.nn.ModuleList(conv(MLP([hidden, hidden, hidden])) for _ in range(layers))
        self.head = MLP([hidden, hidden, 1], norm=None, dropout=0.5)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        """Predict a number for each graph, float32 `[G, 1]`."""
        x = self.atoms(x.view(-1))
        given = () if self.bonds is None else (self.bonds(edge_attr),)
        for conv in self.convs:
            x = conv(x, edge_index, *given).relu()
        return self.head(global_add_pool(x, batch, size=batch_size))  # type: ignore[no-any-return]


def measure_graph_training(scale: float, size: int = 128, steps: int = 100, workers: Sequence[int] = (0,),
                     hidden: int = 64, layers: int = 5, warm: int = _WARM_STEPS) -> Iterator[Row]:  # fmt: skip
    """Measure a training step of GIN and GINE, with its batch: ours accelerated by default, beside PyG's loader and
    kernels.

    Args:
        scale: Share of ZINC's 12,000 graphs.
        size: Graphs per batch.
        steps: Steps of a window.
        workers: Numbers of workers of PyG's loader.
        warm: Steps before the timed ones.
    """
    device = resolve_device(None)
    dataset = _Molecules(max(4, int(12_000 * scale)))
    options: dict[str, Any] = {"batch_size": min(size, len(dataset)), "shuffle": True, "drop_last": True}
    for kind in ("GIN", "GINE"):
        torch.manual_seed(0)
        model = _Network(kind, hidden, layers).to(device)
        loaders: dict[str, Any] = {"pyg_direct": DataLoader(dataset, device=device, **options)}
        for count in workers:
            more = {"num_workers": count, "persistent_workers": count > 0, "pin_memory": device.type == "cuda"}
            loaders[f"PyG, {count} workers"] = PygDataLoader(dataset, **options, **more)
        models = {name: copy.deepcopy(model) for name in loaders}
        accelerate(models["pyg_direct"])
        training = {name: _train(models[name], loaders[name], device) for name in loaders}
        seconds: dict[str, list[float]] = {name: [] for name in loaders}
        for steps_of in training.values():
            _time_steps(steps_of, warm)
        for _ in range(WINDOWS):
            for name, steps_of in training.items():
                seconds[name].append(_time_steps(steps_of, steps))
        case = f"small graphs/{device.type}/training {kind}/{min(size, len(dataset))}"
        for name, times in seconds.items():
            yield Row.of(case, f"step, {name}", "ms", [1e3 * each for each in times])
        ours = seconds.pop("pyg_direct")
        best = [min(times) for times in zip(*seconds.values(), strict=True)]
        ratios = [theirs / own for theirs, own in zip(best, ours, strict=True)]
        yield Row.of(case, "step, PyG's best over pyg_direct", "x", ratios, note="of times side by side")


def _train(model: torch.nn.Module, loader: Any, device: torch.device) -> Iterator[None]:
    """Train step after step, epoch after epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in chain.from_iterable(repeat(loader)):
        batch = batch.to(device, non_blocking=True)
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index, batch.edge_attr, batch.batch, batch.num_graphs)
        F.l1_loss(out.view(-1), batch.y).backward()
        optimizer.step()
        yield


def _time_steps(training: Iterator[None], count: int) -> float:
    """Measure seconds per step."""
    wait_for_gpu()
    begin = time.perf_counter()
    for _ in islice(training, count):
        pass
    wait_for_gpu()
    return (time.perf_counter() - begin) / count


def _measure_memory(count: int, size: int) -> Iterator[Row]:
    """Measure the peak of host memory that a loader and an epoch add, over the bytes of the graphs."""
    dataset = _Molecules(count)
    views = [dataset[number] for number in range(count)]
    num_bytes = sum(value.nbytes for graph in views for _, value in graph)
    for form, graphs in {"list": views, "separate": [graph.clone() for graph in views]}.items():
        ratios = []
        for _ in range(3):
            gc.collect()
            # Memory that was freed before does not hide new memory, and the peak begins anew.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = _read_status("VmRSS")
            for _ in DataLoader(graphs, size, shuffle=True, device="cpu"):
                pass
            ratios.append((_read_status("VmHWM") - before) / num_bytes)
        yield Row.of(f"small graphs/cpu/{form}/memory", "peak over the graphs", "x", ratios,
                     note=f"{num_bytes / 1e6:.0f} MB of graphs")  # fmt: skip


def _read_status(name: str) -> int:
    """Read a size of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _time(epochs: Iterator[Any], batches: int, device: torch.device) -> float:
    """Measure seconds per batch, on the device."""
    wait_for_gpu()
    begin = time.perf_counter()
    for batch in islice(epochs, batches):
        batch.to(device, non_blocking=True)
    wait_for_gpu()
    return (time.perf_counter() - begin) / batches


def _time_copies(batch: Any, batches: int, device: torch.device) -> float:
    tensors = [value for value in batch.to_dict().values() if isinstance(value, Tensor)]
    wait_for_gpu()
    begin = time.perf_counter()
    for _ in range(batches):
        for tensor in tensors:
            tensor.clone()
    wait_for_gpu()
    return (time.perf_counter() - begin) / batches
