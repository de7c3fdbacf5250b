"""Choices of `placement="auto"` for a graph that is known by its size alone."""

from __future__ import annotations

from typing import NamedTuple

from pyg_direct.graph.placed_topology import SMALL_SHARE
from pyg_direct.loader.memory_placement import Placed, Rows, choose_places
from pyg_direct.runtime.cuda.device import budget_of


class Graph(NamedTuple):
    """The size of a graph: nodes, edges, and float32 features of a node."""

    num_nodes: int
    num_edges: int
    num_features: int = 0

    @property
    def offset_bytes(self) -> int:
        """Bytes of the row offsets."""
        return 8 * (self.num_nodes + 1)

    @property
    def edge_id_bytes(self) -> int:
        """Bytes of the edge ids."""
        return (4 if self.num_edges < 2**31 else 8) * self.num_edges

    @property
    def topology_bytes(self) -> int:
        """Bytes of offsets, neighbors and edge ids, as `CSRTopo` holds them for a list of edges."""
        return self.offset_bytes + (4 if self.num_nodes < 2**31 else 8) * self.num_edges + self.edge_id_bytes

    @property
    def attributes(self) -> list[Rows]:
        """Features `x`, if any, and labels `y`."""
        x = Rows("x", 4 * self.num_features * self.num_nodes, self.num_nodes, may_be_cached=True)
        y = Rows("y", 8 * self.num_nodes, self.num_nodes, may_be_cached=True)
        return [x, y] if self.num_features else [y]


class Plan(NamedTuple):
    """Places of a graph.

    Attributes:
        parts: Topology, features and labels.
        gpu_bytes: GPU memory that they would take.
        host_bytes: Host memory that they would take.
    """

    parts: list[Placed]
    gpu_bytes: int
    host_bytes: int


def plan_placement(graph: Graph, free_on_gpu: int | None, host: str = "unified") -> Plan:
    """Choose places for topology, features and labels, as loaders do by default.

    Args:
        graph: The graph.
        free_on_gpu: Free GPU memory in bytes; None without a GPU.
        host: The kind of host memory that the GPU reads faster.
    """
    if free_on_gpu is None:
        sizes = {"topology": graph.topology_bytes} | {rows.key: rows.num_bytes for rows in graph.attributes}
        return Plan([Placed(name, size, "cpu") for name, size in sizes.items()], 0, sum(sizes.values()))
    parts, on_gpu = [Placed("topology", graph.topology_bytes, "cuda")], graph.topology_bytes
    if graph.topology_bytes > budget_of(free_on_gpu):
        # Short arrays go to the GPU all the same.
        short = graph.offset_bytes, graph.edge_id_bytes
        on_gpu = sum(size for size in short if size <= SMALL_SHARE * free_on_gpu)
        parts = [Placed("topology", graph.topology_bytes, host)]
    on_host = graph.topology_bytes - on_gpu
    places = choose_places(graph.attributes, budget_of(free_on_gpu - on_gpu), is_auto=True, fill_cache=True)
    for rows in graph.attributes:
        place, hot_bytes = places[rows.key]
        if place == "cuda":
            parts.append(Placed(rows.key, rows.num_bytes, "cuda"))
            on_gpu += rows.num_bytes
        else:
            parts.append(Placed(rows.key, rows.num_bytes, host, min(1.0, hot_bytes / max(1, rows.num_bytes))))
            on_gpu += hot_bytes
            on_host += rows.num_bytes
    return Plan(parts, on_gpu, on_host)
