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
        raise ArgumentError(f"num_neighbors must be by relation: {error}, got {num_neighbors}") from error


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
        raise ArgumentError(f"num_neighbors: {error}") from error
    return {edge_type: check_fanouts(f"num_neighbors[{edge_type}]", own) for edge_type, own in by_relation.items()}
