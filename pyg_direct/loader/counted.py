"""Where the number of nodes of a graph comes from, for messages about ids that lie outside it."""

from __future__ import annotations

from typing import Any

from torch_geometric.data import Data, HeteroData

# What PyG counts the rows of where nobody says how many nodes there are, in the order of the attributes.
_KEYS = ("x", "feat", "pos", "batch", "node_type", "n_id", "tf")


def tell_count(message: str, data: Any) -> str:
    """A message about ids that are not below num_nodes, and which attribute told that number.

    Args:
        message: It names the number as `(num_nodes)`, or with the type as `(num_nodes['paper'])`.
        data: The graph; others than PyG's `Data` and `HeteroData` tell nothing.
    """
    if ", got -" in message:
        return message
    if isinstance(data, Data) and "(num_nodes)" in message:
        return f"{message}: {_tell_store(data._store, 'data')}"
    for kind in data.node_types if isinstance(data, HeteroData) else ():
        if f"(num_nodes[{kind!r}])" in message:
            return f"{message}: {_tell_store(data[kind], f'data[{kind!r}]')}"
    return message


def _tell_store(store: Any, name: str) -> str:
    if "num_nodes" in store:
        return f"{name}.num_nodes was set to {store['num_nodes']}; edges may only name nodes below it"
    keys = [key for key, value in store.items() if hasattr(value, "shape") or key == "tf"]
    told = [key for key in keys if key in _KEYS] or [key for key in keys if "node" in key]
    if told:
        rows = f"{name}.{told[0]}"
        return f"{name}.num_nodes is not set, so the rows of {rows} tell it; give {rows} a row for each node"
    return f"{name}.num_nodes is not set; set it"
