"""Fanouts of loaders and samplers, as PyG keeps them and by relation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_geometric.sampler import NumNeighbors
from torch_geometric.typing import EdgeTypeStr

from pyg_direct.errors import ArgumentError
from pyg_direct.graph.relation import EdgeType
from pyg_direct.ops.check import check_fanouts


class Fanouts(NumNeighbors):  # type: ignore[misc]
    """Fanouts as PyG keeps them, whose keys are names of relations in one string, and by relation: the strings of two
    relations may be equal.

    Args:
        values: A list, or one for each relation.
        default: For relations that are not named.

    Raises:
        ValueError: PyG refuses them, for the reason given.
    """

    def __init__(self, values: Any, default: Any = None) -> None:
        super().__init__(values, default)
        named = values if isinstance(values, dict) else {}
        # As PyG keeps its own: the class is frozen.
        self.__dict__["by_relation"] = {_read_relation(key): own for key, own in named.items()}

    @property
    def relations(self) -> dict[EdgeType, Any]:
        """Fanouts of the relations that are named."""
        return self.__dict__["by_relation"]  # type: ignore[no-any-return]


def _read_relation(key: Any) -> EdgeType:
    # Before 2.7 PyG's strings do not know the names that they are joined of.
    is_whole = isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key)
    return key if is_whole else EdgeTypeStr(key).to_tuple()


def keep_fanouts(num_neighbors: Any) -> Fanouts:
    """A list of fanouts, or one for each relation, in an object of PyG's class that nothing was asked of yet.

    Raises:
        ArgumentError, ArgumentTypeError: `num_neighbors`, rule and value.
    """
    if isinstance(num_neighbors, Fanouts):
        kept = Fanouts(num_neighbors.values, num_neighbors.default)
        kept.__dict__["by_relation"] = dict(num_neighbors.relations)
        return kept
    if isinstance(num_neighbors, NumNeighbors):
        # PyG's class remembers what it answered for the first graph.
        return Fanouts(num_neighbors.values, num_neighbors.default)
    if not isinstance(num_neighbors, Mapping):
        return Fanouts(check_fanouts("num_neighbors", num_neighbors))
    try:
        return Fanouts(dict(num_neighbors))
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"num_neighbors must be by relation: {error}, got {num_neighbors}: name each as (source "
                            "type, name, target type)") from error  # fmt: skip


def read_fanouts(num_neighbors: NumNeighbors, edge_types: Sequence[EdgeType] | None) -> Any:
    """Fanouts per hop, or these for each relation in the order of the graph; `edge_types` is None without types.

    Raises:
        ArgumentError, ArgumentTypeError: `num_neighbors`, rule and value.
    """
    if isinstance(num_neighbors.values, (list, tuple)):
        return check_fanouts("num_neighbors", num_neighbors.values)
    if edge_types is None:
        raise ArgumentError("num_neighbors must be a list for a graph without types, got one for each relation")
    # A sampler that was saved by an older version holds one of PyG's.
    kept = num_neighbors if isinstance(num_neighbors, Fanouts) else keep_fanouts(num_neighbors)
    named, default = kept.relations, kept.default
    unknown = [edge_type for edge_type in named if edge_type not in edge_types]
    if unknown:
        raise ArgumentError("num_neighbors must name relations of the graph, got "
                            f"{_list(unknown)}: it has {_list(edge_types)}")  # fmt: skip
    missing = [edge_type for edge_type in edge_types if edge_type not in named]
    if missing and default is None:
        raise ArgumentError("num_neighbors must have fanouts for every relation of the graph, got none for "
                            f"{_list(missing)}; [0] for each hop takes no neighbors")  # fmt: skip
    given: dict[EdgeType, Any] = {**dict.fromkeys(edge_types, default), **named}
    fanouts = {edge_type: check_fanouts(f"num_neighbors[{edge_type}]", own) for edge_type, own in given.items()}
    hops = {edge_type: len(own) for edge_type, own in fanouts.items()}
    if len(set(hops.values())) > 1:
        told = ", ".join(f"{count} for {edge_type}" for edge_type, count in hops.items())
        # In the words that programs may look for in PyG's message.
        raise ArgumentError(f"num_neighbors: the number of hops must be the same across all relations, got {told}")
    return fanouts


def _list(edge_types: Sequence[EdgeType]) -> str:
    return ", ".join(map(str, edge_types))
