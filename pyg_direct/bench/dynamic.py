"""Epochs of dynamic graph networks over frames: ours beside PyTorch Geometric Temporal and what can be made of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch_geometric.data import Data

from pyg_direct.bench.dynamic_ways import MODELS, WAYS, Model
from pyg_direct.bench.row import Row
from pyg_direct.bench.timing import wait_for_gpu
from pyg_direct.dynamic import FrameTrainer, nn, stream
from pyg_direct.dynamic.trainer import run_recurrent


class _Streamed:
    """The loop of a script, over our stream and layers."""

    def __init__(self, model: Model, signal: Sequence[Data], window: int, device: torch.device) -> None:
        self.way = WAYS["resident PyGT"](model, signal, window, device)
        given = stream(list(signal), device, keep="device")
        self.way.moved = [given[t] for t in range(len(given))]  # type: ignore[attr-defined]

    def epoch(self) -> float:
        """Train over all frames."""
        return self.way.epoch()


class Trained:
    """`FrameTrainer`."""

    def __init__(self, model: Model, signal: Sequence[Data], window: int, device: torch.device,
                 memory: str | None = None) -> None:  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)
        self.trainer = FrameTrainer(model, list(signal), optimizer, window=window, step=run_recurrent, device=device,
                                    memory=memory)  # fmt: skip

    def epoch(self) -> float:
        """Train over all frames."""
        return self.trainer.train_epoch()


def measure_dynamic_epochs(sets: Mapping[str, Sequence[Data]], models: Sequence[str] = MODELS,
                           ways: Sequence[str] | None = None, window: int = 8, hidden: int = 32, epochs: int = 5,
                           seconds_each: float = 2.0, device: str = "cuda") -> Iterator[Row]:  # fmt: skip
    """Median seconds of an epoch after two that prepare, their ratios to ours, and how far losses differ.

    Args:
        sets: Snapshots by the name of their graph.
        models, ways: Which to run; None takes every way.
        window, hidden: Snapshots of a frame, and width of the state.
        epochs, seconds_each: Epochs measured at most, and how long a way may take before it measures no more.
        device: Where to train.
    """
    from torch_geometric_temporal.nn import recurrent as theirs

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    for name, signal in sets.items():
        num_nodes, num_features = signal[0].x.shape
        for kind in models:
            times: dict[str, list[float]] = {}
            losses: dict[str, float] = {}
            trainer = None
            for way in [*(WAYS if ways is None else ways), "ours, stream", "ours, FrameTrainer"]:
                torch.manual_seed(0)
                is_ours = way.startswith("ours")
                model = Model(kind, nn if is_ours else theirs, num_features, num_nodes, hidden).to(where)
                make: Any = {"ours, stream": _Streamed, "ours, FrameTrainer": Trained}.get(way) or WAYS[way]
                run = make(model, signal, window, where)
                try:
                    times[way], losses[way] = time_epochs(run, epochs, seconds_each)
                except RuntimeError as error:
                    if not way.startswith("resident PyGT, "):
                        raise
                    # Not every model can be captured, nor every machine compile one.
                    wait_for_gpu()
                    yield Row(f"dynamic/{name}/{kind}", f"{way}, failed", "ms", 0, 0, 0,
                              note=str(error).splitlines()[0])  # fmt: skip
                if way == "ours, FrameTrainer":
                    trainer = run.trainer
                del run, model
            case = f"dynamic/{name}/{kind}"
            for way, seconds in times.items():
                yield Row.of(case, way, "ms", [1e3 * s for s in seconds], note=f"second loss {losses[way]:.6g}")
            ours = min(times["ours, FrameTrainer"])
            for way, seconds in times.items():
                if not way.startswith("ours"):
                    yield Row.of(case, f"{way} over ours", "x", [s / ours for s in seconds])
            if trainer is not None:
                yield Row.of(case, "moved to the GPU an epoch", "MB", [trainer.history[-1]["moved_bytes"] / 1e6],
                             note="; ".join(trainer.decisions))  # fmt: skip


def time_epochs(run: Any, epochs: int, seconds_each: float) -> tuple[list[float], float]:
    """Seconds of each epoch after two that prepare, and the loss of the second."""
    begin = time.perf_counter()
    run.epoch()
    loss = run.epoch()
    seconds: list[float] = []
    while not seconds or (len(seconds) < epochs and time.perf_counter() - begin < seconds_each):
        wait_for_gpu()
        start = time.perf_counter()
        run.epoch()
        wait_for_gpu()
        seconds.append(time.perf_counter() - start)
    return seconds, loss


def mean_ratios(rows: Sequence[Row]) -> Iterator[Row]:
    """Geometric mean, least and largest of each ratio over all cases."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.metric.endswith(" over ours"):
            ratios.setdefault(row.metric, []).append(row.p50)
    for metric, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        yield Row("dynamic/all", metric, "x", min(values), mean, max(values),
                  note=f"least, geometric mean and largest of {len(values)} cases")  # fmt: skip
