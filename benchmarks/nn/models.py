"""Training of PyG's models, plain and accelerated: steps on one batch, epochs with the loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from benchmarks.nn.aggregation import capture
from pyg_direct.bench.limits import pinned_copy_rate, time_on_clock, time_on_gpu
from pyg_direct.bench.loader import find_loss, run_steps, train, without_end
from pyg_direct.bench.result_row import Row
from pyg_direct.features.feature import Feature
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.nn.accelerate import accelerate
from pyg_direct.nn.replay.graphed_step import GraphedStep
from pyg_direct.runtime.cuda.device import resolve_device

MODELS = {"SAGE": GraphSAGE, "GCN": GCN, "GIN": GIN, "GAT": GAT}
_FANOUTS = [15, 10, 5]
_WARM_UP = 8
_WINDOWS = 6
_TURNS = 15
# (placement, topology placement, feature cache) of an epoch, by description.
_PLACES = {"GPU": ("cuda", None, None), "20 % cached": ("unified", "cuda", "20%"),
           "features on the host": ("unified", "cuda", None), "host": ("unified", None, None)}  # fmt: skip
# Replay of a model's passes within steps that are not captured.
_MODEL = "accelerated, model replayed"
# Batches whose rows on the host are read together, if there are any.
_GROUP = 8


def measure_accelerated_steps(batch: Data, num_classes: int, name: str, hidden: int = 256) -> Iterator[Row]:
    """Measure training steps of trimmed models with as many layers as hops, plain and accelerated.

    GPU time is measured with a step replayed as a CUDA graph, wall time with a step launched from Python.
    """
    device = batch.x.device
    for kind, model_class in MODELS.items():
        plain = model_class(batch.x.shape[1], hidden, len(batch.num_sampled_edges), num_classes).to(device)
        fast = copy.deepcopy(plain)
        accelerate(fast, replay=False)
        steps = {"PyG": _make_step(plain, batch), "accelerated": _make_step(fast, batch)}
        if device.type == "cuda":
            replayed = copy.deepcopy(plain)
            accelerate(replayed, replay=True)
            steps["model replayed"] = _make_step(replayed, batch)
        wall: dict[str, list[float]] = {way: [] for way in steps}
        for turn in range(_TURNS):
            # A host's speed varies; the first way takes turns too.
            for way in list(steps) if turn % 2 else reversed(steps):
                # Passes are recorded after this many.
                wall[way] += time_on_clock(steps[way], 4 if device.type == "cuda" else 1, 1 if turn else 2 * _WARM_UP)
        ways = list(steps)[:2] if device.type == "cuda" else []
        alone = {way: _time_graph(steps[way]) for way in ways}
        case = f"models/{name}/{kind} step"
        yield from _compare(case, "wall", wall)
        yield from _compare(case, "GPU", alone)


def _make_step(model: torch.nn.Module, batch: Data) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        find_loss(model, batch).backward()

    return step


def _time_graph(step: Callable[[], Any]) -> list[float]:
    """Measure seconds of each replay of a step; empty if it waits for the GPU, which cannot be captured."""
    replay = capture(step)
    return [] if replay is None else time_on_gpu(replay, 20)


def _compare(case: str, metric: str, times: dict[str, list[float]]) -> Iterator[Row]:
    """Yield rows of PyG's times and of ours, and their ratios."""
    for way, seconds in times.items():
        if seconds:
            yield Row.of(case, f"{way}, {metric}", "ms", [1e3 * s for s in seconds])
    for way in list(times)[1:] if all(times.values()) else []:
        ratios = [a / b for a, b in zip(sorted(times["PyG"]), sorted(times[way]), strict=True)]
        yield Row.of(case, f"PyG over {way}, {metric}", "x", ratios)


def measure_epochs(data: Data, train_idx: Tensor, num_classes: int, name: str, batches: int = 48) -> Iterator[Row]:
    """Measure a training step with our loader, of models plain and accelerated, for features on the GPU and on the
    host.

    Also of plain SAGE with PyG's loader, if it can sample. The limit is the slowest of three parts alone. The first is
    the same step on as many batches in memory, each for the first time, as sorted edges are cached in a batch. The
    second is loading. The third is a copy over the link of a batch's rows outside of GPU memory.
    """
    on_gpu = torch.cuda.is_available()
    places = _PLACES if on_gpu else {"CPU": ("cpu", None, None)}
    # Its workers must read rows before they are moved.
    peers = measure_pyg_epochs(data, train_idx, num_classes) if WITH_PYG_LIB or WITH_TORCH_SPARSE else {}
    for title, seconds in peers.items():
        yield Row.of(f"models/{name}/SAGE epoch, PyG's loader", title, "ms", seconds)
    for place, (placement, topology, cache) in places.items():
        # Ways that move their rows are measured once.
        kinds = MODELS if place == next(iter(places)) else {"SAGE": GraphSAGE}
        make = partial(NeighborLoader, num_neighbors=_FANOUTS, input_nodes=train_idx,
                       batch_size=min(1024, len(train_idx)), shuffle=True, drop_last=True, seed=0, placement=placement,
                       topology_placement=topology, feature_cache=cache)  # fmt: skip
        loader = make(copy.copy(data))
        first = next(iter(loader))
        alone = _time_alone(loader, batches)
        link = 1e3 * count_host_bytes(loader, first, batches) / pinned_copy_rate() if on_gpu else 0.0
        for kind, model_class in kinds.items():
            model = model_class(first.x.shape[1], 256, len(_FANOUTS), num_classes).to(first.x.device)
            case, times = f"models/{name}/{kind} epoch, {place}", {}
            ways = ["PyG's kernels", "accelerated", *([_MODEL, "accelerated, replayed"] if on_gpu else [])]
            shared = [f"{way}, super-batch {_GROUP}" for way in ways[1:] if placement == "unified"]
            for way in [*ways, *shared]:
                if way != ways[0]:
                    accelerate(model, replay=way.startswith(_MODEL))
                used, loading, count = loader, alone, batches
                if way in shared:
                    # Windows of whole groups.
                    used, count = make(copy.copy(data), super_batch=_GROUP), _WINDOWS * 2 * _GROUP
                    loading = _time_alone(used, count)
                step = _make_epoch_step(model, is_replayed=way.startswith("accelerated, replayed"))
                if "replayed" in way:
                    # Learns the sizes of batches.
                    run_steps(without_end(used), step, 2 * _WARM_UP, 2)
                compute = median(run_steps(list(islice(without_end(loader), batches)), step, batches))
                times[way] = run_steps(without_end(used), step, count)
                note = f"of compute {compute:.2f}, loading {loading:.2f}, link {link:.2f} ms"
                yield Row.of(case, f"step with loader, {way}", "ms", times[way], max(compute, loading, link),
                             "slowest part alone",
                             f"{note} for the rows of one batch" if way in shared else note)  # fmt: skip
            for way in list(times)[1:]:
                ratio = median(times["PyG's kernels"]) / median(times[way])
                yield Row.of(case, f"PyG's kernels over {way}", "x", [ratio])
                if kind == "SAGE" and peers:
                    best = min(peers, key=lambda title: median(peers[title]))
                    ratio = median(peers[best]) / median(times[way])
                    yield Row.of(case, f"PyG's loader and kernels over {way}", "x", [ratio], note=best)


def _time_alone(loader: NeighborLoader, batches: int) -> float:
    """Measure milliseconds per batch without training."""
    return median(run_steps(without_end(loader), lambda batch: None, batches))


def measure_pyg_epochs(data: Data, train_idx: Tensor, num_classes: int, turns: int = 9) -> dict[str, list[float]]:
    """Measure milliseconds of a training step of SAGE with PyG's own loader and kernels, by workers of the loader."""
    device, size = resolve_device(None), min(1024, len(train_idx))
    model = GraphSAGE(data.num_features, 256, len(_FANOUTS), num_classes).to(device)
    step, times = _make_epoch_step(model), {}
    for count in (8, 16) if device.type == "cuda" else (0,):
        loader = PygNeighborLoader(data, _FANOUTS, train_idx, batch_size=size, shuffle=True, drop_last=True,
                                   num_workers=count, persistent_workers=count > 0,
                                   filter_per_worker=True)  # fmt: skip
        batches = (batch.to(device) for batch in without_end(loader))
        # Batches that workers prefetched, two each, are used up after a window.
        title = f"step, {'pyg-lib' if WITH_PYG_LIB else 'torch-sparse'}, {count} workers"
        times[title] = run_steps(batches, step, turns * max(1, count), 3)
    return times


def count_host_bytes(loader: NeighborLoader, batch: Data, batches: int) -> float:
    """Count the bytes of a batch's rows read from the host, at the mean rate of some batches."""
    feature: Feature = loader._list_places()[1]["x"]
    feature.count_served()
    run_steps(without_end(loader), lambda batch: None, batches)
    misses = 1 - feature.hit_rate
    feature.count_served(False)
    return misses * batch.x.numel() * batch.x.element_size()


def _make_epoch_step(model: torch.nn.Module, is_replayed: bool = False) -> Callable[[Any], Any]:
    # One launch, if torch supports it.
    optimizer = torch.optim.Adam(model.parameters(), fused=next(model.parameters()).is_cuda)
    if is_replayed:
        return GraphedStep(model, partial(find_loss, model), optimizer, warm_up=_WARM_UP)
    return partial(train, model, optimizer)
