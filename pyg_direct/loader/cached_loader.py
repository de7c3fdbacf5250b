"""`CachedLoader`: batches of any loader, cached for later epochs, after PyG's loader of that name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch_geometric.data.data import BaseData
from torch_geometric.loader import CachedLoader as PygCachedLoader

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.loader.prefetch_loader import check_loader, show_loader
from pyg_direct.object_text import one_line, show_count
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.typing import Device


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
