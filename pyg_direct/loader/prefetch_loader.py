"""`PrefetchLoader` and `CachedLoader`: PyG's loaders that copy the batches of any loader ahead, or keep them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.loader import CachedLoader as PygCachedLoader, PrefetchLoader as PygPrefetchLoader

from pyg_direct.errors import ArgumentTypeError, DeviceError
from pyg_direct.loader.base_loader import EpochLoader
from pyg_direct.loader.collate.graph_columns import move_all
from pyg_direct.loader.prefetch.drivers import hold_for
from pyg_direct.object_text import one_line, show_count
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.launch import side_streams
from pyg_direct.typing import Device

_END = object()


class PrefetchLoader(PygPrefetchLoader):  # type: ignore[misc]
    """Batches of any loader on `device`, each copied while the previous one is in use, after PyG's `PrefetchLoader`.

    Pageable tensors are page-locked for the copy; tensors on the device are not copied. One batch is taken from the
    loader ahead, also on a CPU, as in PyG's. Loaders of this package that make batches on `device` prefetch themselves:
    their batches are passed on.

    Args:
        loader: Any iterable of batches: graphs, tensors, and lists, tuples and dictionaries of them.
        device: Device of the batches; None is the current GPU if there is one, otherwise the CPU.

    Raises:
        ArgumentTypeError: `loader` is not iterable.
        ArgumentError: `device` is no device.
        DeviceError: the machine has GPUs, but not `device`. Without any GPU the CPU is used, with a warning, as by
            PyG's.
        NotImplementedError: `device` is neither a CPU nor a CUDA device.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> loader = PrefetchLoader(NeighborLoader(ring, [-1], batch_size=2, device="cpu"), device="cpu")
        >>> [batch.n_id.tolist() for batch in loader]
        [[0, 1, 3], [2, 3, 1]]
    """

    def __init__(self, loader: Iterable[Any], device: Device = None) -> None:
        check_loader(loader)
        target = read_device(device)
        # PyG warns without a GPU, and uses the CPU.
        super().__init__(loader, device if target is None else target)
        self.device = resolve_device(self.device_helper.device)

    def non_blocking_transfer(self, batch: Any) -> Any:
        """Copy a batch to the device on the current stream, without waiting.

        Args:
            batch: Batch of a loader.
        """
        if self.device.type == "cpu":
            return batch
        return self._transfer(batch)

    def _transfer(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy(value)
        if isinstance(value, BaseData):
            # PyG moves the graph in place, which a loader may hold.
            return copy.copy(value).apply(self._copy)
        if isinstance(value, Mapping):
            return {key: self._transfer(part) for key, part in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._transfer, value))
        if isinstance(value, (list, tuple)):
            return [self._transfer(part) for part in value]
        return move_all(value, self.device)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return move_all(value, self.device)
        if value.device == self.device:
            return value
        is_pageable = value.device.type == "cpu" and value.layout is torch.strided and not value.is_pinned()
        return (value.pin_memory() if is_pageable else value).to(self.device, non_blocking=True)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of an epoch of the loader."""
        if isinstance(self.loader, EpochLoader) and self.loader.device == self.device:
            return iter(self.loader)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        batches = iter(self.loader)
        ahead = self._take(batches)
        while ahead is not _END:
            batch, ahead = ahead, self._take(batches)
            yield self._hand_out(batch)

    def _take(self, batches: Iterator[Any]) -> Any:
        """Take the next batch, with the event after its copy; `_END` after the last."""
        batch = next(batches, _END)
        if batch is _END or self.device.type == "cpu":
            return batch if batch is _END else (batch, None)
        stream = side_streams(self.device.index)[0]
        # Tensors already on the device were written on the current stream.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            moved = self.non_blocking_transfer(batch)
        return moved, stream.record_event()

    def _hand_out(self, taken: tuple[Any, Any]) -> Any:
        batch, ready = taken
        if ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(ready)
            _hold(batch, current)
        return batch

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.loader)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_loader(self.loader)
        yield str(self.device)


def show_loader(loader: Any) -> str:
    """Describe a loader for `repr`: by its own text, or by the number of batches of a list."""
    if isinstance(loader, (list, tuple)):
        return f"{type(loader).__name__} of {show_count(len(loader), 'batch', 'batches')}"
    return repr(loader)


def _hold(value: Any, stream: Any) -> None:
    """Mark the tensors of a batch as used on `stream` for torch's allocator."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            _hold(part, stream)
    elif isinstance(value, (Tensor, BaseData)):
        hold_for(value, stream)


def read_device(device: Device) -> torch.device | None:
    """Read the device of an argument, as `resolve_device`; None for a GPU on a machine without any."""
    name = str(device).partition(":")[0]
    if name in ("xpu", "mps", "hpu"):
        raise NotImplementedError(f"device={str(device)!r} is neither a CPU nor a CUDA device")
    try:
        return resolve_device(device)
    except DeviceError:
        if torch.cuda.is_available():
            raise
        return None


def check_loader(loader: Any) -> None:
    """Check that a loader is iterable."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ArgumentTypeError(f"loader must give batches when it is iterated over, got {type(loader).__name__}")


class CachedLoader(PygCachedLoader):  # type: ignore[misc]
    """Batches of any loader, made in one epoch and cached for all others, after PyG's `CachedLoader`.

    After an abandoned epoch the next one starts from the beginning; PyG's repeats the first batches. Cached batches are
    the same objects in each epoch. They do not have later writes to the graph; `clear` drops them.

    Args:
        loader: Any iterable of batches: graphs, tensors, and lists, tuples and dictionaries of them.
        device: Device of the cached batches; None leaves them on the loader's device.
        transform: Called with each batch once, before it is moved and cached.

    Raises:
        ArgumentTypeError: `loader` is not iterable, or `transform` not callable.
        ArgumentError, DeviceError: `device` is no device, or a GPU that does not exist.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> loader = CachedLoader(NeighborLoader(ring, [-1], batch_size=2, device="cpu"), device="cpu")
        >>> [[batch.n_id.tolist() for batch in loader] for epoch in range(2)]  # the second epoch samples nothing
        [[[0, 1, 3], [2, 3, 1]], [[0, 1, 3], [2, 3, 1]]]
    """

    def __init__(
        self, loader: Iterable[Any], device: Device = None, transform: Callable[[Any], Any] | None = None
    ) -> None:
        check_loader(loader)
        if transform is not None and not callable(transform):
            raise ArgumentTypeError(f"transform must be callable or None, got {type(transform).__name__}")
        super().__init__(loader, None if device is None else resolve_device(device), transform)
        self._is_complete = False

    def clear(self) -> None:
        """Drop the cached batches; the next epoch makes them again."""
        super().clear()
        self._is_complete = False

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of an epoch."""
        return iter(list(self._cache)) if self._is_complete else self._fill()

    def _fill(self) -> Iterator[Any]:
        kept: list[Any] = []
        self._cache = kept
        for batch in self.loader:
            made = batch if self.transform is None else self.transform(batch)
            kept.append(made if self.device is None else _move(made, self.device))
            yield kept[-1]
        # Unless the cache was cleared, or another epoch began meanwhile.
        self._is_complete |= self._cache is kept

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.loader)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_loader(self.loader)
        if self.device is not None:
            yield str(self.device)
        yield f"{show_count(len(self._cache), 'batch', 'batches')} kept"


def _move(value: Any, device: torch.device) -> Any:
    """Move all parts of a batch to a device."""
    if isinstance(value, BaseData):
        # PyG moves the graph in place, which a loader may hold.
        return copy.copy(value).to(device)
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _move(part, device) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [_move(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [_move(part, device) for part in value] if isinstance(value, list) else value
