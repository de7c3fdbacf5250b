"""`stream`: iterate a temporal signal as before, with its snapshots on the device and its first aggregation shared.

`read_snapshots` reads a signal of PyG Temporal or a list; `discretize` cuts a list of events into snapshots.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, TemporalData

from pyg_direct.dynamic.sequence_edges import Parts
from pyg_direct.dynamic.snapshot import LazyTensor, tag
from pyg_direct.dynamic.snapshot_plan import SnapshotPlan
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.argument_checks import check_choice
from pyg_direct.progress import show_wait
from pyg_direct.runtime.cuda.device import free_bytes, resolve_device
from pyg_direct.runtime.host.host_memory import keep_blocks, parse_size
from pyg_direct.runtime.host.tensor_views import ordinary_tensors, version_of
from pyg_direct.typing import Device

# Numbers of two tensors that are compared before all of them are.
_COMPARED = 2**10


def read_snapshots(signal: Any) -> list[Any]:
    """Read the snapshots of a signal: `Data`, `HeteroData` or `Batch` each, with equal tensors held once.

    Args:
        signal: Any signal of PyTorch Geometric Temporal (all have `snapshot_count`), or a sequence of `Data`.
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


KEEPS = ("auto", "device", "host")
# Bytes that are copied while other steps process a number.
_ITEM_BYTES = 2**10
# Attributes of a snapshot that layers recognize.
_ROLES = {"x": "x", "edge_index": "edge_index", "edge_attr": "edge_weight"}


class SnapshotStream:
    """Snapshots in order, as the signals of PyTorch Geometric Temporal give them; see `stream`.

    Iteration returns the stream itself and starts again; `stream[t]` is a snapshot and `stream[a:b]` a stream of some.
    Threads that iterate in parallel need one each, `stream[:]`; aggregated features are shared.

    Args:
        snapshots: All of them, in order.
        plan: Plan of the snapshots.
        times: Snapshots of this stream.
        source: Returns a snapshot again, by its number, after a program wrote to its tensors; None keeps the written
            values.

    Attributes:
        plan: Plan of the snapshots; None for heterogeneous ones.

    Example:
        >>> edges = [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 2], [1, 0]]), torch.tensor([[1], [0]])]
        >>> snapshots = stream([Data(x=torch.eye(3), edge_index=edge_index) for edge_index in edges], device="cpu")
        >>> snapshots[:2], snapshots[2].edge_index.tolist()
        (SnapshotStream(2 snapshots, cpu), [[1], [0]])
    """

    def __init__(self, snapshots: Sequence[Any], plan: SnapshotPlan | None, times: range, source: Any = None) -> None:
        self._snapshots, self.plan, self._times, self._source = snapshots, plan, times, source
        self.t = 0

    @property
    def times(self) -> range:
        """Snapshots of the plan that are in this stream."""
        return self._times

    @property
    def snapshot_count(self) -> int:
        """Number of snapshots."""
        return len(self._times)

    def __len__(self) -> int:
        return len(self._times)

    @overload
    def __getitem__(self, index: int) -> Data | HeteroData: ...
    @overload
    def __getitem__(self, index: slice) -> SnapshotStream: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return SnapshotStream(self._snapshots, self.plan, self._times[index], self._source)
        if not hasattr(index, "__index__"):
            raise ArgumentTypeError(f"index must be an integer or a slice, got {index!r}")
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must lie in [{-len(self)}, {len(self)}), got {index}")
        time = self._times[index]
        snapshot = copy.copy(self._snapshots[time])
        written = []
        for place, store in enumerate(snapshot.stores):
            for key, value in list(store.items()):
                if isinstance(value, LazyTensor):
                    # Fetched tensors live as long as the returned snapshot.
                    store[key] = value.renew()
                elif version_of(value) > 0 or (isinstance(value, Tensor) and value.requires_grad):
                    # A program wrote to it or asked it for gradients, or learns the tensor that it was copied from.
                    written.append((place, key))
        if written and self._source is not None:
            self._read_anew(snapshot, time, written)
        return snapshot

    @ordinary_tensors()
    def _read_anew(self, snapshot: Any, time: int, written: list[tuple[int, str]]) -> None:
        """Replace tensors that a program wrote to, by store and key, by copies of the source's tensors."""
        stores = self._source[time].stores
        for place, key in written:
            store, given = snapshot.stores[place], stores[place][key]
            value = _copy(given, store[key].device)
            # A learned tensor differs from the plan's, even if no gradient is requested now.
            is_known = self.plan is not None and key in _ROLES and not given.requires_grad
            store[key] = tag(value, self.plan, time, _ROLES[key]) if is_known else value

    def __iter__(self) -> SnapshotStream:
        self.t = 0
        return self

    def __next__(self) -> Data | HeteroData:
        if self.t >= len(self):
            self.t = 0
            raise StopIteration
        self.t += 1
        return self[self.t - 1]

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(len(self), "snapshot")
        if self.plan is not None:
            yield str(self.plan.device)


@ordinary_tensors()
def stream(signal: Any, device: Device = None, *, keep: str = "auto", memory: int | str | None = None,
           group_size: int | str = "auto", form: str = "mask") -> SnapshotStream:  # fmt: skip
    """Wrap a temporal signal, so that its snapshots are on the device and layers of `dynamic.nn` share work.

    Iteration, indexing and splitting stay as in PyTorch Geometric Temporal; values are equal. If a program changes the
    features of a snapshot before a layer gets them, that layer aggregates the changed ones. Writes to tensors of a
    snapshot are gone when the snapshot is given the next time. Writes that torch does not count, through `.data` or an
    array that shares a tensor's memory (`x.numpy()`), are not seen. Layers then use the old features, and if snapshots
    are held on the device the next one given has the written values.

    Args:
        signal: Any signal of PyTorch Geometric Temporal, or a list of `Data`, which is read once. The tensors of a list
            must not be written to afterwards, except for learned ones, which are read with every snapshot.
        device: Device of the snapshots; None is the current GPU, or the CPU if there is no GPU.
        keep: "device" holds all snapshots there. "host" copies features, edges and weights of a snapshot only when they
            are read; layers that find them aggregated already do not read them. It holds tensors that require
            gradients. "auto" takes the first if all of them fit half of the free memory of the GPU.
        memory: Memory of the device for matrices and aggregated features, as bytes, "2G" or "10%" of the snapshots'
            size. Data that does not fit stays in host memory and is copied when used. Matrices of the snapshot or frame
            that is being trained on, and the rows of the frame, come in addition. None sets no limit but the free
            memory of the GPU.
        group_size: Snapshots aggregated at once: 1, 2, 4 or 8; "auto" takes 8, or as many whose rows fit a CPU's
            nearest cache, in the form that suits the edges that they share.
        form: Form of shared edges if `group_size` is a number, "split" or "mask".

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        MemoryLimitError: `memory` is less than the features of one snapshot; the message gives the bytes of all.
        DeviceError: `device` is not there.

    Example:
        >>> edges = [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 2], [1, 0]])]
        >>> snapshots = stream([Data(x=torch.eye(3), edge_index=edge_index) for edge_index in edges], device="cpu")
        >>> [snapshot.edge_index.tolist() for snapshot in snapshots]
        [[[0, 1], [1, 2]], [[0, 2], [1, 0]]]
    """
    check_choice("keep", keep, KEEPS)
    chosen = resolve_device(device)
    snapshots = read_snapshots(signal)
    mover = _Mover(chosen)
    if any(isinstance(snapshot, HeteroData) for snapshot in snapshots):
        moved = [s.clone().apply(mover.move) for s in snapshots]
        return SnapshotStream(moved, None, range(len(moved)), snapshots)
    parts = [_read_parts(snapshot, t) for t, snapshot in enumerate(snapshots)]
    total = _count_bytes(snapshots)
    limit = None if memory is None else parse_size(memory, total, "memory")
    with show_wait("moving snapshots", items=total // _ITEM_BYTES):
        if chosen.type == "cpu":
            # Results of layers for a snapshot or a frame have the same size in each.
            keep_blocks()
        plan = SnapshotPlan(parts, chosen, group_size, form, limit)
        is_lazy = keep == "host" or (keep == "auto" and not _fits(total, chosen, limit))
        given = []
        for t, snapshot in enumerate(snapshots):
            moved = copy.copy(snapshot)
            for key, value in snapshot.items():
                if not isinstance(value, Tensor):
                    continue
                role = _ROLES.get(key)
                if role is None:
                    moved[key] = mover.move(value)
                elif is_lazy and not value.requires_grad:
                    moved[key] = tag(LazyTensor(value, chosen, partial(_copy, value, chosen)), plan, t, role)
                else:
                    # Snapshots that share a tensor need different objects, so each has its own view.
                    moved[key] = tag(mover.move(value).view_as(value), plan, t, role)
            given.append(moved)
    return SnapshotStream(given, plan, range(len(given)), snapshots)


class _Mover:
    """Copies of tensors on a device, one of each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moved: dict[int, Tensor] = {}

    def move(self, value: Tensor) -> Tensor:
        """Return the copy of a tensor, which the caller keeps alive."""
        if id(value) not in self._moved:
            self._moved[id(value)] = _copy(value, self.device)
        return self._moved[id(value)]


def _copy(value: Tensor, device: torch.device) -> Tensor:
    # A program's changes of a snapshot must not reach the signal.
    return value.to(device, copy=True)


def _count_bytes(snapshots: Sequence[Any]) -> int:
    tensors = {id(v): v for snapshot in snapshots for _, v in snapshot.items() if isinstance(v, Tensor)}
    return sum(v.numel() * v.element_size() for v in tensors.values())


def _fits(num_bytes: int, device: torch.device, limit: int | None) -> bool:
    if limit is not None:
        return num_bytes <= limit
    return device.type != "cuda" or 2 * num_bytes <= free_bytes(device.index)


def _read_parts(snapshot: Any, time: int) -> Parts:
    edge_index, x, weight = snapshot.get("edge_index"), snapshot.get("x"), snapshot.get("edge_attr")
    for name, value in (("x", x), ("edge_index", edge_index)):
        # Sparse ones of torch_sparse count as well.
        if value is not None and not hasattr(value, "numel"):
            hint = ": give torch.from_numpy of it" if isinstance(value, np.ndarray) else ""
            raise ArgumentTypeError(f"{name} must be a tensor at snapshot {time}, got {type(value).__name__}{hint}")
    num_nodes = snapshot.num_nodes
    if num_nodes is None:
        raise ArgumentError(f"signal must tell the nodes of every snapshot, got none at {time}")
    if edge_index is None:
        # Attributes then belong to edges of another form.
        edge_index, weight = torch.empty(2, 0, dtype=torch.int64, device="cpu"), None
    elif weight is not None:
        _check_edge_attr(edge_index, weight, time)
        # Messages of several numbers an edge are no weights.
        weight = weight if weight.numel() == edge_index.shape[-1] else None
    others = [v for key, v in snapshot.items() if isinstance(v, Tensor) and key not in _ROLES]
    return Parts(x, edge_index, weight, int(num_nodes), sum(v.numel() * v.element_size() for v in others))


def _check_edge_attr(edge_index: Tensor, edge_attr: Any, time: int) -> None:
    num_edges = edge_index.shape[-1]
    if not isinstance(edge_attr, Tensor):
        raise ArgumentTypeError(f"edge_attr must be a tensor at snapshot {time}, got {type(edge_attr).__name__}")
    if edge_attr.shape[:1] != (num_edges,):
        shape = tuple(edge_attr.shape)
        raise ArgumentError(f"edge_attr must have a row for each of {num_edges} edges of snapshot {time}, got {shape}")
