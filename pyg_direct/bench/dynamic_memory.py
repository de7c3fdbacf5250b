"""Training over frames where part of the data does not fit: epochs and bytes copied under caps on GPU memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.bench.dynamic import Trained, time_epochs
from pyg_direct.bench.dynamic_ways import MODELS, WAYS, Model
from pyg_direct.bench.row import Row
from pyg_direct.dynamic import nn

CAPS = ("10%", "50%", "100%")


def measure_dynamic_memory(sets: Mapping[str, Sequence[Data]], models: Sequence[str] = MODELS,
                           caps: Sequence[str] = CAPS, ways: Sequence[str] = ("PyGT", "PyGT-A"), window: int = 8,
                           hidden: int = 32, epochs: int = 5, seconds_each: float = 2.0,
                           device: str = "cuda") -> Iterator[Row]:  # fmt: skip
    """Epochs under caps on what our caches hold, as shares of the data's bytes, beside ways that hold nothing.

    Bytes are those copied to the GPU in an epoch after the preparing ones; PyGT copies every snapshot of each frame.
    """
    from torch_geometric_temporal.nn import recurrent as theirs

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    for name, signal in sets.items():
        num_nodes, num_features = signal[0].x.shape
        visited = sum(map(_count_bytes, _visit(signal, window)))
        # What each snapshot takes as CSR with 32-bit columns, sent once.
        once = sum(4 * (num_nodes + 1) + _edge_bytes(s) + _count_bytes(s, ("x", "y")) for s in signal)
        for kind in models:
            case = f"dynamic/{name}/{kind}"
            beside = {}
            for way in ways:
                torch.manual_seed(0)
                run = WAYS[way](Model(kind, theirs, num_features, num_nodes, hidden).to(where), signal, window, where)
                beside[way], _ = time_epochs(run, epochs, seconds_each)
                yield Row.of(case, way, "ms", [1e3 * s for s in beside[way]])
            for cap in caps:
                torch.manual_seed(0)
                model = Model(kind, nn, num_features, num_nodes, hidden).to(where)
                trained = Trained(model, signal, window, where, cap)
                seconds, loss = time_epochs(trained, epochs, seconds_each)
                moved = trained.trainer.history[-1]["moved_bytes"]
                limited = f"{case}/memory {cap}"
                yield Row.of(limited, "ours, FrameTrainer", "ms", [1e3 * s for s in seconds],
                             note=f"second loss {loss:.6g}; {'; '.join(trained.trainer.decisions)}")  # fmt: skip
                for way, others in beside.items():
                    yield Row.of(limited, f"{way} over ours", "x", [s / min(seconds) for s in others])
                yield Row.of(limited, "moved an epoch", "MB", [moved / 1e6])
                yield Row.of(limited, "moved over PyGT-A's", "x", [moved / visited])
                yield Row.of(limited, "moved over CSR snapshots sent once", "x", [moved / once])


def _visit(signal: Sequence[Data], window: int) -> Iterator[Data]:
    for first in range(len(signal) - window + 1):
        yield from signal[first : first + window]


def _count_bytes(snapshot: Data, keys: Sequence[str] = ("x", "edge_index", "edge_attr", "y")) -> int:
    given = (snapshot.get(key) for key in keys)
    return sum(v.numel() * v.element_size() for v in given if isinstance(v, Tensor))


def _edge_bytes(snapshot: Data) -> int:
    return (4 if snapshot.edge_attr is None else 8) * snapshot.num_edges
