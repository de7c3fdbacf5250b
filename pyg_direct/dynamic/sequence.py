"""Snapshots from any container: signals of PyTorch Geometric Temporal, lists of `Data`, timed edges."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, TemporalData

from pyg_direct.errors import ArgumentError, ArgumentTypeError

# Numbers of two tensors that are compared before all of them are.
_COMPARED = 2**10


def read_snapshots(signal: Any) -> list[Any]:
    """Read the snapshots of a signal: `Data`, `HeteroData` or `Batch` each, with equal tensors held once.

    Args:
        signal: Any signal of PyTorch Geometric Temporal (all have `snapshot_count`), or a sequence of `Data`.

    Raises:
        ArgumentTypeError: it is neither.
        ArgumentError: it has no snapshot.
    """
    if hasattr(signal, "snapshot_count"):
        snapshots = [signal[t] for t in range(signal.snapshot_count)]
    elif isinstance(signal, Iterable) and not isinstance(signal, (Data, TemporalData, Tensor, str)):
        snapshots = list(signal)
    else:
        raise ArgumentTypeError(f"signal must be a temporal signal or a list of Data, got {type(signal).__name__}")
    if not snapshots:
        raise ArgumentError("signal must have at least one snapshot, got none")
    known: dict[tuple[int, str], Tensor] = {}
    for t, snapshot in enumerate(snapshots):
        if not hasattr(snapshot, "stores"):
            raise ArgumentTypeError(f"signal must hold Data, HeteroData or Batch, got {type(snapshot).__name__} at {t}")
        for place, store in enumerate(snapshot.stores):
            for key, value in list(store.items()):
                if isinstance(value, Tensor):
                    before = known.get((place, key))
                    same = before is not None and _is_same(before, value)
                    known[place, key] = value if not same or before is None else before
                    if same:
                        store[key] = before
    return snapshots


def _is_same(first: Tensor, second: Tensor) -> bool:
    if first is second:
        return True
    if first.requires_grad or second.requires_grad:
        # They become different as they are learned.
        return False
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    # Most tensors that differ do so in some of the first numbers.
    few = (value.reshape(-1)[:_COMPARED] if value.is_contiguous() else value for value in (first, second))
    return torch.equal(*few) and torch.equal(first, second)


def discretize(data: TemporalData | Data, window: int, *, edge_life: int = 1, x: Tensor | None = None,
               num_nodes: int | None = None, start: float | None = None) -> list[Data]:  # fmt: skip
    """Cut a stream of timed edges into snapshots.

    Args:
        data: `TemporalData` (`src`, `dst`, `t`, perhaps `msg`), or `Data` with `edge_index` and `time` or `edge_time`
            `[E]`, perhaps `edge_attr`.
        window: Length of a snapshot, in the unit of the times.
        edge_life: Snapshots that contain an edge, from its own on; 0 keeps every edge in all later ones.
        x: Features of the nodes, of any dtype, `[N, F]`, the same in every snapshot, or `[T, N, F]`; None takes the
            features of `data`.
        num_nodes: N; None takes the number of `x`, of `data` if it was given, or the largest id and one.
        start: Time at which the first snapshot begins; None takes the time of the first edge.

    Returns:
        `Data` with `x`, `edge_index` and `edge_attr` (messages or weights of the edges) for each of the T snapshots up
        to the last edge; empty ones too.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.

    Example:
        >>> from torch_geometric.data import TemporalData
        >>> edges = TemporalData(src=torch.tensor([0, 1, 2]), dst=torch.tensor([1, 2, 0]), t=torch.tensor([0, 3, 14]))
        >>> snapshots = discretize(edges, window=10, x=torch.eye(3))
        >>> [snapshot.edge_index.tolist() for snapshot in snapshots]
        [[[0, 1], [1, 2]], [[2], [0]]]
    """
    if not isinstance(data, (TemporalData, Data)):
        raise ArgumentTypeError(f"data must be TemporalData or Data, got {type(data).__name__}")
    if isinstance(window, bool) or not isinstance(window, Real):
        raise ArgumentTypeError(f"window must be a number, got {window!r}")
    if isinstance(edge_life, bool) or not isinstance(edge_life, Integral):
        raise ArgumentTypeError(f"edge_life must be an integer, got {edge_life!r}")
    if num_nodes is not None and (isinstance(num_nodes, bool) or not isinstance(num_nodes, Integral)):
        raise ArgumentTypeError(f"num_nodes must be an integer, got {num_nodes!r}")
    if not window >= 1:
        raise ArgumentError(f"window must be at least 1, got {window}")
    if edge_life < 0:
        raise ArgumentError(f"edge_life must be at least 0, got {edge_life}")
    if isinstance(data, TemporalData):
        edges, times, message = torch.stack([data.src, data.dst]), data.t, data.get("msg")
    else:
        edges, message = data.edge_index, data.edge_attr
        times = data.get("time", data.get("edge_time"))
        x = data.x if x is None else x
        num_nodes = data.get("num_nodes") if num_nodes is None else num_nodes
    if edges is None:
        raise ArgumentError("data must have an edge_index, got None")
    if times is None or times.shape != (edges.shape[1],):
        shape = None if times is None else tuple(times.shape)
        raise ArgumentError(f"data must have a time for each of its {edges.shape[1]} edges, got {shape}")
    if times.numel() == 0:
        raise ArgumentError("data must have at least one edge, got none")
    num_nodes = _count_nodes(edges, x, num_nodes)
    number = _number_edges(times, window, start)
    order = torch.argsort(number, stable=True)
    edges, number = edges[:, order].long(), number[order]
    message = None if message is None else message[order]
    count = int(number[-1]) + 1
    if x is not None and x.dim() == 3 and x.shape[0] < count:
        raise ArgumentError(f"x must have features of {count} snapshots, got {x.shape[0]}")
    bounds = torch.searchsorted(number, torch.arange(count + 1, device=number.device)).tolist()
    out = []
    for t in range(count):
        first = 0 if edge_life == 0 else bounds[max(0, t + 1 - edge_life)]
        part = slice(first, bounds[t + 1])
        features = x[t] if x is not None and x.dim() == 3 else x
        out.append(Data(x=features, edge_index=edges[:, part], num_nodes=num_nodes,
                        edge_attr=None if message is None else message[part]))  # fmt: skip
    return out


def _number_edges(times: Tensor, window: Any, start: Any) -> Tensor:
    """Return the snapshots that edges of these times begin in, int64 `[E]`."""
    first, last = (end.item() for end in torch.aminmax(times))
    for end in (first, last):
        if not math.isfinite(end):
            raise ArgumentError(f"data must have times that are finite, got {end}")
    if isinstance(start, Tensor) and start.dim() == 0:
        start = start.item()
    if isinstance(start, bool) or not isinstance(start, Real | None):
        raise ArgumentTypeError(f"start must be a number, got {start!r}")
    start = first if start is None else start
    if not -math.inf < start <= first:
        rule = f"not be behind the first edge at {first}" if start > first else "be finite"
        raise ArgumentError(f"start must {rule}, got {start}")
    if not times.is_floating_point() and all(float(given).is_integer() for given in (start, window)):
        # Torch would make float32 of these times beside a float, whose steps are two minutes for present times in
        # seconds.
        return torch.div(times.long() - int(start), int(window), rounding_mode="floor")
    return torch.div(times.double() - float(start), float(window), rounding_mode="floor").long()


def _count_nodes(edges: Tensor, x: Tensor | None, num_nodes: int | None) -> int:
    """Return the nodes of snapshots with these edges and features."""
    if x is not None and not isinstance(x, Tensor):
        raise ArgumentTypeError(f"x must be a tensor, got {type(x).__name__}")
    if x is not None and x.dim() not in (2, 3):
        raise ArgumentError(f"x must have the shape [N, F] or [T, N, F], got {tuple(x.shape)}")
    given = num_nodes if x is None else x.shape[-2]
    if x is not None and num_nodes not in (None, given):
        raise ArgumentError(f"num_nodes must be the {given} of x, got {num_nodes}")
    least, most = (int(end) for end in torch.aminmax(edges))
    if least < 0 or (given is not None and most >= given):
        rule = "of at least 0" if given is None else f"in [0, {given})"
        raise ArgumentError(f"data must have edges between nodes {rule}, got {least if least < 0 else most}")
    return most + 1 if given is None else given
