"""Training over frames with data that does not fit: epochs and bytes copied under caps on GPU memory."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.dynamic.epochs import Course, Trained, take_turns
from benchmarks.dynamic.ways import MODELS, WAYS, Model
from pyg_direct.bench.result_row import Row
from pyg_direct.dynamic import nn, stream
from pyg_direct.errors import needs_extra

CAPS = ("10%", "50%", "100%")


def measure_dynamic_memory(sets: Mapping[str, Sequence[Data]], models: Sequence[str] = MODELS,
                           caps: Sequence[str] = CAPS, ways: Sequence[str] = ("PyGT", "PyGT-A"), window: int = 8,
                           hidden: int = 32, epochs: int = 5, seconds_each: float = 20.0,
                           device: str = "cuda") -> Iterator[Row]:  # fmt: skip
    """Measure epochs under caps on our caches, as shares of the data's bytes, beside ways without caches.

    All models of a cap train on one stream, whose structures are made once. The rows of a frame's snapshots lie on the
    GPU in addition to the cap. Bytes are those copied to the GPU in an epoch after the preparing ones; PyGT copies
    every snapshot of each frame.
    """
    with needs_extra("a comparison with PyTorch Geometric Temporal", "temporal"):
        from torch_geometric_temporal.nn import recurrent as theirs

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    for name, signal in sets.items():
        num_nodes, num_features = signal[0].x.shape
        visited = sum(map(_count_bytes, _visit(signal, window)))
        # Bytes of each snapshot as CSR with 32-bit columns, sent once.
        once = sum(4 * (num_nodes + 1) + _edge_bytes(s) + _count_bytes(s, ("x", "y")) for s in signal)
        # Rows of the snapshots that enter frames; the first one follows the last.
        rows = count_entering(len(signal), window) * num_nodes * num_features * 4
        streams: dict[str, Any] = {cap: stream(list(signal), where, memory=cap, keep="host") for cap in caps}
        for kind in models:
            case = f"dynamic/{name}/{kind}"

            def make(way: str, kind: str = kind, signal: Sequence[Data] = signal, streams: Any = streams) -> Any:
                torch.manual_seed(0)
                layers = nn if way in streams else theirs
                model = Model(kind, layers, num_features, num_nodes, hidden).to(where)  # noqa: B023
                return (Trained if way in streams else WAYS[way])(model, streams.get(way, signal), window, where)

            courses = take_turns({way: partial(make, way) for way in (*ways, *caps)}, epochs, seconds_each)
            done = {way: course for way, course in courses.items() if isinstance(course, Course)}
            for way, course in courses.items():
                if isinstance(course, str):
                    yield Row(case, f"{way}, failed", "ms", 0, 0, 0, note=course)
                elif way in ways:
                    yield Row.of(case, way, "ms", [1e3 * s for s in course.measured])
            for cap in filter(done.__contains__, caps):
                trainer, seconds = done[cap].run.trainer, done[cap].measured
                moved = trainer.history[-1]["moved_bytes"]
                limited = f"{case}/memory {cap}"
                yield Row.of(limited, "ours, FrameTrainer", "ms", [1e3 * s for s in seconds],
                             note=f"last loss {done[cap].losses[-1]:.6g}; {'; '.join(trainer.decisions)}")  # fmt: skip
                for way in filter(done.__contains__, ways):
                    turns = zip(done[way].measured, seconds, strict=True)
                    yield Row.of(limited, f"{way} over ours", "x", [others / mine for others, mine in turns])
                yield Row.of(limited, "moved an epoch", "MB", [moved / 1e6],
                             note=f"frames of {window} of {len(signal)} snapshots")  # fmt: skip
                yield Row.of(limited, "moved over PyGT-A's", "x", [moved / visited])
                # Models of one layer read these rows, and no edges.
                least = max(0, rows - (streams[cap].plan.budget.limit or 0)) / once
                limit = least if least and kind != "MPNN-LSTM" else None
                yield Row.of(limited, "moved over CSR snapshots sent once", "x", [moved / once], limit,
                             "aggregated features that the cap does not hold" if limit else "")  # fmt: skip
                hidden_share = find_hidden_share(trainer.trace_epoch().spans())
                if hidden_share is not None:
                    yield Row.of(limited, "copies hidden", "x", [hidden_share],
                                 note="of their time; for the rest the stream that computes waited")  # fmt: skip


def find_hidden_share(spans: Sequence[tuple[str, float, float]]) -> float | None:
    """Return the share of the seconds of copies ahead of use for which the computing stream did not wait; None without
    such copies.

    A stream waits while a copy is in flight: the rest of a span "wait" is the host's time to queue it.
    """
    copies = sorted((first, last) for lane, first, last in spans if lane == "copy")
    waits = [(first, last) for lane, first, last in spans if lane == "wait"]
    copied = sum(last - first for first, last in copies)
    # The stream copies one after the other, and each waits once for the next: no moment counts twice.
    ends, waited = [last for _, last in copies], 0.0
    for begin, end in waits:
        for first, last in copies[bisect(ends, begin) :]:
            if first >= end:
                break
            waited += min(end, last) - max(begin, first)
    return max(0.0, 1 - waited / copied) if copied else None


def count_entering(num_snapshots: int, window: int) -> int:
    """Count the snapshots that enter a frame in an epoch; the previous frame's are there already."""
    later = num_snapshots - window
    return later + min(window, later)


def _visit(signal: Sequence[Data], window: int) -> Iterator[Data]:
    for first in range(len(signal) - window + 1):
        yield from signal[first : first + window]


def _count_bytes(snapshot: Data, keys: Sequence[str] = ("x", "edge_index", "edge_attr", "y")) -> int:
    given = (snapshot.get(key) for key in keys)
    return sum(v.numel() * v.element_size() for v in given if isinstance(v, Tensor))


def _edge_bytes(snapshot: Data) -> int:
    return (4 if snapshot.edge_attr is None else 8) * snapshot.num_edges
