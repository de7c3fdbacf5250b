"""Fanouts of loaders and samplers, as PyG keeps them and by relation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_geometric.sampler import NumNeighbors

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.relation import EdgeType
from pyg_direct.ops.check import check_fanouts


def keep_fanouts(num_neighbors: Any) -> NumNeighbors:
    """A list of fanouts, or one for each relation, in an object of PyG's class that nothing was asked of yet.

    Raises:
        ArgumentError, ArgumentTypeError: `num_neighbors`, rule and value.
    """
    if isinstance(num_neighbors, NumNeighbors):
        # PyG's class remembers what it answered for the first graph.
        return NumNeighbors(num_neighbors.values, num_neighbors.default)
    if not isinstance(num_neighbors, Mapping):
        return NumNeighbors(check_fanouts("num_neighbors", num_neighbors))
    try:
        return NumNeighbors(dict(num_neighbors))
    except ValueError as error:
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
    try:
        by_relation = keep_fanouts(num_neighbors).get_values(list(edge_types))
    except (ArgumentError, ArgumentTypeError):
        raise
    except (ValueError, TypeError) as error:
        raise ArgumentError(_name_fault(num_neighbors, edge_types) or f"num_neighbors: {error}") from error
    return {edge_type: check_fanouts(f"num_neighbors[{edge_type}]", own) for edge_type, own in by_relation.items()}


def _name_fault(num_neighbors: NumNeighbors, edge_types: Sequence[EdgeType]) -> str | None:
    """What is wrong with fanouts by relation, and where; None where it is something else."""
    given = {key.to_tuple(): own for key, own in num_neighbors.values.items()}
    unknown = [edge_type for edge_type in given if edge_type not in edge_types]
    if unknown:
        return f"num_neighbors must name relations of the graph, got {_list(unknown)}: it has {_list(edge_types)}"
    missing = [edge_type for edge_type in edge_types if edge_type not in given]
    if missing and num_neighbors.default is None:
        return (f"num_neighbors must have fanouts for every relation of the graph, got none for {_list(missing)}; [0] "
                "for each hop takes no neighbors")  # fmt: skip
    hops = {edge_type: len(given.get(edge_type, num_neighbors.default)) for edge_type in edge_types}
    if len(set(hops.values())) > 1:
        told = ", ".join(f"{count} for {edge_type}" for edge_type, count in hops.items())
        return f"num_neighbors must have as many hops for every relation, got {told}"
    return None


def _list(edge_types: Sequence[EdgeType]) -> str:
    return ", ".join(map(str, edge_types))
