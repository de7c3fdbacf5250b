"""Copies of PyG's graphs and of their stores, over the same tensors."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch_geometric.data import Data


def without_edge_attributes(data: Data) -> Data:
    """A copy of a graph whose edges have no attributes: those of a sample may be others."""
    data = copy.copy(data)
    store = data._store
    for key in [key for key in store if store.is_edge_attr(key) and key not in ("edge_index", "adj_t")]:
        del store[key]
    return data


def copy_store(store: Any, parent: weakref.ref[Any]) -> Any:
    """A copy of a store of a graph, for another."""
    made = store.__class__.__new__(store.__class__)
    values = made.__dict__
    values.update(store.__dict__)
    values["_mapping"], values["_parent"] = values["_mapping"].copy(), parent
    if "_cached_attr" in values:
        del values["_cached_attr"]
    return made


def copy_data(data: Data) -> Data:
    """`copy.copy(data)`, in a third of the time."""
    if type(data).__copy__ is not Data.__copy__:
        return copy.copy(data)
    batch = data.__class__.__new__(data.__class__)
    batch.__dict__.update(data.__dict__)
    batch.__dict__["_store"] = copy_store(data._store, weakref.ref(batch))
    return batch
