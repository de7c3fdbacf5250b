"""Ids of a batch and its seed links on the host, as in PyG, copied there only at the first read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage, recursive_apply

from pyg_direct.ops.rows.upload import upload

IDS = frozenset({"n_id", "e_id", "input_id"})
# Fields of a link loader's seeds, which ids index.
LINKS = frozenset({"edge_label_index", "edge_label", "edge_label_time", "src_index", "dst_pos_index", "dst_neg_index"})
_HOST = torch.device("cpu")


class _LazyIds(BaseStorage):  # type: ignore[misc]
    """A store of a batch in which some tensors move to another device when they are read by name.

    If a tensor is moved or replaced before, as by `batch.to(device)`, this takes precedence.
    """

    def __getitem__(self, key: str) -> Any:
        # No property: PyG's `__getattr__` would shadow it in a half-made copy.
        waiting: dict[str, torch.device | Tensor] = self.__dict__.get("_waiting", {})
        if key in waiting:
            # The target device, or the tensor that is there already.
            shown = waiting[key]
            self[key] = shown if isinstance(shown, Tensor) else self._mapping[key].to(shown)
        return super().__getitem__(key)

    def get(self, key: str, value: Any = None) -> Any:
        """Return an attribute, moved as by `__getitem__`; PyG's own method, as `batch.get`, bypasses `__getitem__`."""
        return self[key] if key in self._mapping else value

    def __setitem__(self, key: str, value: Any) -> None:
        # Copies of the batch share the table, so it is not edited.
        waiting = self.__dict__.get("_waiting", {})
        self.__dict__["_waiting"] = {name: device for name, device in waiting.items() if name != key}
        super().__setitem__(key, value)

    def __deepcopy__(self, memo: dict[int, Any] | None) -> _LazyIds:
        # PyG's own shares everything but the attributes: a read of the copy would change the original.
        out: _LazyIds = super().__deepcopy__(memo)
        out.__dict__["_waiting"] = copy.deepcopy(self.__dict__.get("_waiting", {}), memo)
        return out

    def __reduce__(self) -> Any:
        # Pickled as PyG's class, with ids on the host: it must load without this package.
        state: dict[str, Any] = super().__getstate__()
        waiting = state.pop("_waiting", {})
        state["_mapping"] = {key: self[key] if key in waiting else value for key, value in state["_mapping"].items()}
        return next(plain for plain, lazy in _LAZY.items() if lazy is type(self)), (), state

    def apply(self, func: Callable[[Any], Any], *args: str) -> _LazyIds:
        """Apply `func` to all attributes, or to the named ones. Batches move by this method; PyG's own takes twice the
        time.
        """
        mapping, is_bare = self._mapping, "_cached_attr" not in self.__dict__
        # Copies of the batch share the table, so it is not edited.
        waiting = dict(self.__dict__.get("_waiting", {}))
        for key in [key for key in args if key in mapping] if args else list(mapping):
            value = mapping[key]
            made = func(value) if type(value) is Tensor else recursive_apply(value, func)
            if is_bare and made is not None:
                mapping[key] = made
            else:
                super().__setitem__(key, made)
            shown = waiting.pop(key, None)
            if shown is not None and made is not value and isinstance(made, Tensor) and made.device == value.device:
                # A new tensor in its place, such as a clone, keeps the device.
                waiting[key] = shown.device if isinstance(shown, Tensor) else shown
        self.__dict__["_waiting"] = waiting
        return self


class LazyGlobalStorage(_LazyIds, GlobalStorage):  # type: ignore[misc]
    """Store of all attributes of a `Data`."""


class LazyNodeStorage(_LazyIds, NodeStorage):  # type: ignore[misc]
    """Store of a node type."""


class LazyEdgeStorage(_LazyIds, EdgeStorage):  # type: ignore[misc]
    """Store of an edge type."""


_LAZY = {GlobalStorage: LazyGlobalStorage, NodeStorage: LazyNodeStorage, EdgeStorage: LazyEdgeStorage}


def show_ids(batch: Any, device: torch.device = _HOST) -> Any:
    """Make `n_id`, `e_id`, `input_id` and the fields of seed links of a batch appear on `device`.

    A program written for PyG may use them to index tensors on the host; ids on the host index tensors on a GPU too.

    Args:
        batch: A `Data` or `HeteroData`, changed in place; for `(batch_size, n_id, adjs)` of PyG's old sampler a new
            tuple is returned.
        device: Device of the ids.
    """
    if isinstance(batch, tuple) and len(batch) == 3 and isinstance(batch[1], Tensor):
        return batch[0], batch[1].to(device), batch[2]
    if isinstance(batch, BaseData):
        for store in batch.stores:
            found = (IDS | LINKS) & store._mapping.keys()
            waiting: dict[str, Any] = {key: device for key in found if _is_elsewhere(store._mapping[key], device)}
            if waiting and type(store) in _LAZY:
                _send(store._mapping, found - waiting.keys(), waiting)
                # The store's own `__setattr__` would add it as an attribute.
                object.__setattr__(store, "__class__", _LAZY[type(store)])
                store.__dict__["_waiting"] = waiting
    return batch


def _send(mapping: dict[str, Any], keys: set[str], waiting: dict[str, Any]) -> None:
    """Copy ids that are already on the right device to the GPU too; otherwise `batch.to` would wait for the GPU.

    Args:
        mapping: The attributes.
        keys: The ids.
        waiting: Target devices of ids elsewhere; the ids of `keys` are added.
    """
    place = mapping[next(iter(waiting))].device
    for key in keys:
        if isinstance(mapping[key], Tensor):
            mapping[key], waiting[key] = upload(mapping[key], place), mapping[key]


def _is_elsewhere(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device != device
