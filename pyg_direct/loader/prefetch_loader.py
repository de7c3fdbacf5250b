"""`PrefetchLoader`: batches of any loader, copied to a GPU one ahead, after PyG's loader of that name."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.loader import PrefetchLoader as PygPrefetchLoader

from pyg_direct.errors import ArgumentTypeError, DeviceError
from pyg_direct.loader.base_loader import EpochLoader
from pyg_direct.loader.collate.graph_columns import move_all
from pyg_direct.loader.prefetch.gpu_streams import hold_for
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.launch import side_streams
from pyg_direct.typing import Device

_END = object()


class PrefetchLoader(PygPrefetchLoader):  # type: ignore[misc]
    """The batches of any loader on `device`, each copied while the one before is used, after PyG's `PrefetchLoader`.

    Pageable tensors are page-locked for the copy; what is on the device stays as it is. One batch is taken from the
    loader ahead, on a CPU too, as by PyG's. Loaders of this package that make batches on `device` do so ahead
    themselves: theirs are handed on.

    Args:
        loader: Anything that gives batches: graphs, tensors, and lists, tuples and dictionaries of them.
        device: Where batches are; None is the current GPU if there is one, else the CPU.

    Raises:
        ArgumentTypeError: `loader` gives no batches.
        ArgumentError: `device` is no device.
        DeviceError: the machine has GPUs, but not `device`; without any the CPU is taken, with a warning, as by PyG's.
        NotImplementedError: `device` is neither a CPU nor a CUDA device.
    """

    def __init__(self, loader: Any, device: Device = None) -> None:
        check_loader(loader)
        target = read_device(device)
        # PyG warns where there is no GPU, and takes the CPU.
        super().__init__(loader, device if target is None else target)
        self.device = resolve_device(self.device_helper.device)

    def non_blocking_transfer(self, batch: Any) -> Any:
        """A batch on the device, copied on the current stream while the host goes on.

        Args:
            batch: What a loader gave.
        """
        if self.device.type == "cpu":
            return batch
        return self._transfer(batch)

    def _transfer(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy(value)
        if isinstance(value, BaseData):
            # PyG moves the graph itself, which a loader may hold.
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
        """The batches of an epoch of the loader."""
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
        """The next batch, with the event after its copy; `_END` after the last."""
        batch = next(batches, _END)
        if batch is _END or self.device.type == "cpu":
            return batch if batch is _END else (batch, None)
        stream = side_streams(self.device.index)[0]
        # What is there already was written on the current stream.
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
        """Batches of an epoch."""
        return len(self.loader)


def _hold(value: Any, stream: Any) -> None:
    """Tell torch's allocator that the tensors of a batch are used on `stream` too."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            _hold(part, stream)
    elif isinstance(value, (Tensor, BaseData)):
        hold_for(value, stream)


def read_device(device: Device) -> torch.device | None:
    """The device meant by an argument as by `resolve_device`; None for a GPU where there is none at all.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: `device`, rule and value.
        NotImplementedError: it is neither a CPU nor a CUDA device.
    """
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
    """Check that something can be iterated over.

    Raises:
        ArgumentTypeError: it cannot.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ArgumentTypeError(f"loader must give batches when it is iterated over, got {type(loader).__name__}")
