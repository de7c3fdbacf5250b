"""`GraphStore`: PyG's interface to edges, answered by `CSRTopo`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch_geometric.data import EdgeAttr, GraphStore as PygGraphStore
from torch_geometric.data.graph_store import EdgeLayout

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.object_text import one_line


class GraphStore(PygGraphStore):  # type: ignore[misc]
    """Edges of a graph without types behind PyG's `GraphStore`: compressed rows that loaders sample in place.

    With lists in files (`CSRTopo.from_file`) they may be larger than host memory. Edge ids are `eid` of the topology.

    Args:
        topology: The edges; its rows are targets, and with `direction="out"` sources.

    Raises:
        ArgumentTypeError: `topology` is no `CSRTopo`.

    Example:
        >>> graph = GraphStore(CSRTopo(torch.tensor([[1, 2, 3], [0, 0, 1]]), num_nodes=4))
        >>> store = FeatureStore(device="cpu")
        >>> store[None, "x", None] = torch.eye(4)
        >>> next(iter(NeighborLoader((store, graph), [-1], torch.tensor([0]), device="cpu"))).n_id
        tensor([0, 1, 2])
    """

    def __init__(self, topology: CSRTopo) -> None:
        super().__init__()
        if not isinstance(topology, CSRTopo):
            raise ArgumentTypeError(f"topology must be a CSRTopo, got {type(topology).__name__}")
        self._topology = topology

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield repr(self._topology)

    @property
    def topology(self) -> CSRTopo:
        """The topology that holds the edges."""
        return self._topology

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """Return PyG's description of the edges."""
        layout = EdgeLayout.CSR if self._topology.listed == "out" else EdgeLayout.CSC
        return [EdgeAttr(None, layout, size=(self._topology.node_count,) * 2)]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        own = self._topology
        if edge_attr.edge_type is not None or edge_attr.layout != self.get_all_edge_attrs()[0].layout:
            return None
        return (own.indptr, own.indices) if own.listed == "out" else (own.indices, own.indptr)

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        raise ArgumentError(f"edges of {edge_attr.edge_type} cannot be put: make a GraphStore over another CSRTopo")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise ArgumentError(f"edges of {edge_attr.edge_type} cannot be removed: make a GraphStore over another CSRTopo")
