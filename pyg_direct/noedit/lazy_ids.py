"""Ids of a batch, and its seed links, where PyG has them: on the host, copied there only when they are read."""

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
# What a link loader says of its seeds, with which ids are indexed.
LINKS = frozenset({"edge_label_index", "edge_label", "edge_label_time", "src_index", "dst_pos_index", "dst_neg_index"})
_HOST = torch.device("cpu")


class _LazyIds(BaseStorage):  # type: ignore[misc]
    """A part of a batch of which some tensors move to another device when they are read by name.

    What moves or replaces a tensor before that, such as `batch.to(device)`, has the last word.
    """

    def __getitem__(self, key: str) -> Any:
        # A property would be shadowed by PyG's `__getattr__` in a copy that is half made.
        waiting: dict[str, torch.device | Tensor] = self.__dict__.get("_waiting", {})
        if key in waiting:
            # Where it is to be, or what came from there.
            shown = waiting[key]
            self[key] = shown if isinstance(shown, Tensor) else self._mapping[key].to(shown)
        return super().__getitem__(key)

    def get(self, key: str, value: Any = None) -> Any:
        """PyG's own reads past `__getitem__`, as does `batch.get`."""
        return self[key] if key in self._mapping else value

    def __setitem__(self, key: str, value: Any) -> None:
        # Copies of the batch share the table, so it is not edited.
        waiting = self.__dict__.get("_waiting", {})
        self.__dict__["_waiting"] = {name: device for name, device in waiting.items() if name != key}
        super().__setitem__(key, value)

    def __deepcopy__(self, memo: dict[int, Any] | None) -> _LazyIds:
        # PyG's own shares all but the attributes, and what will be shown would be the first one's.
        out: _LazyIds = super().__deepcopy__(memo)
        out.__dict__["_waiting"] = copy.deepcopy(self.__dict__.get("_waiting", {}), memo)
        return out

    def __reduce__(self) -> Any:
        # PyG's, with ids where the program finds them: what is saved must load where this package is not installed.
        state: dict[str, Any] = super().__getstate__()
        waiting = state.pop("_waiting", {})
        state["_mapping"] = {key: self[key] if key in waiting else value for key, value in state["_mapping"].items()}
        return next(plain for plain, lazy in _LAZY.items() if lazy is type(self)), (), state

    def apply(self, func: Callable[[Any], Any], *args: str) -> _LazyIds:
        """PyG's own, by which batches move: `func` of all that is stored, or of what is named, in half the time."""
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
                # Another tensor in its place, such as a clone, did not move.
                waiting[key] = shown.device if isinstance(shown, Tensor) else shown
        self.__dict__["_waiting"] = waiting
        return self


class LazyGlobalStorage(_LazyIds, GlobalStorage):  # type: ignore[misc]
    """All of a `Data`."""


class LazyNodeStorage(_LazyIds, NodeStorage):  # type: ignore[misc]
    """One type of nodes."""


class LazyEdgeStorage(_LazyIds, EdgeStorage):  # type: ignore[misc]
    """One type of edges."""


_LAZY = {GlobalStorage: LazyGlobalStorage, NodeStorage: LazyNodeStorage, EdgeStorage: LazyEdgeStorage}


def show_ids(batch: Any, device: torch.device = _HOST) -> Any:
    """The batch of a loader, of which `n_id`, `e_id`, `input_id` and the fields of seed links are found on `device`.

    A program written for PyG may index tensors on the host with them; tensors on a GPU can be indexed with both.

    Args:
        batch: A `Data` or `HeteroData`, changed in place, or the `(batch_size, n_id, adjs)` of PyG's old sampler, of
            which a new one is made.
        device: Where ids are found.
    """
    if isinstance(batch, tuple) and len(batch) == 3 and isinstance(batch[1], Tensor):
        return batch[0], batch[1].to(device), batch[2]
    if isinstance(batch, BaseData):
        for store in batch.stores:
            found = (IDS | LINKS) & store._mapping.keys()
            waiting: dict[str, Any] = {key: device for key in found if _is_elsewhere(store._mapping[key], device)}
            if waiting and type(store) in _LAZY:
                _send(store._mapping, found - waiting.keys(), waiting)
                # The storage's own `__setattr__` would keep it as a value.
                object.__setattr__(store, "__class__", _LAZY[type(store)])
                store.__dict__["_waiting"] = waiting
    return batch


def _send(mapping: dict[str, Any], keys: set[str], waiting: dict[str, Any]) -> None:
    """Send ids that are where they are found to the device of the others, lest `batch.to` wait for its work.

    Args:
        mapping: The attributes.
        keys: The ids.
        waiting: Where ids are found that are elsewhere; gets what is found of these.
    """
    place = mapping[next(iter(waiting))].device
    for key in keys:
        if isinstance(mapping[key], Tensor):
            mapping[key], waiting[key] = upload(mapping[key], place), mapping[key]


def _is_elsewhere(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device != device
