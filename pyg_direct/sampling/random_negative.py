"""`RandomNegativeSampler`: pairs of nodes that are no edge, after GraphLearn-for-PyTorch's class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.graph.pyg import EdgeList, read_edges
from pyg_direct.graph.topology import CSRTopo
from pyg_direct.runtime.device import resolve_device
from pyg_direct.sampling.key import call_key, check_seed
from pyg_direct.sampling.negative import MAX_NODES, EdgeSet, Nodes, draw_negatives
from pyg_direct.typing import Device

_MODES = ("CPU", "ZERO_COPY", "CUDA")


class RandomNegativeSampler:
    """Draws pairs of nodes and keeps those that are not edges; the n-th call under one seed is equal on every device.

    Args:
        graph: Edges `[2, E]`, sources first, or whatever else `CSRTopo` takes, or a `CSRTopo`.
        mode: GraphLearn's `CPU`, `ZERO_COPY` or `CUDA`; None leaves it to `device`.
        edge_dir: What the rows of a `CSRTopo` are: `out` for sources, `in` for targets; None for what it knows of
            itself, which is `out` where it was made of offsets. Without effect on edges.
        num_nodes: Number of nodes, or (of sources, of targets) where they are of two types; None for one more than the
            highest id.
        device: Where to draw; None is the current GPU if there is one, else the CPU.
        seed: Seed of all draws; with None each call draws one number from torch's generator, and follows from it.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.
    """

    def __init__(self, graph: Any, mode: str | None = None, edge_dir: str | None = None, *,
                 num_nodes: int | tuple[int, int] | None = None, device: Device = None,
                 seed: int | None = None) -> None:  # fmt: skip
        if mode is not None and mode not in _MODES:
            raise ArgumentError(f"mode must be one of {', '.join(_MODES)} or None, got {mode!r}")
        if edge_dir not in ("in", "out", None):
            raise ArgumentError(f"edge_dir must be 'in', 'out' or None, got {edge_dir!r}")
        if mode is not None and device is None:
            device = "cpu" if mode == "CPU" else "cuda"
        self.device = resolve_device(device)
        if mode is not None and (mode == "CPU") != (self.device.type == "cpu"):
            raise ArgumentError(f"device must be one that mode={mode!r} draws on, or None, got {str(self.device)!r}")
        self.seed, self._num_calls = check_seed(seed), 0
        sources, targets, known = _read_pairs(graph, edge_dir)
        if num_nodes is None:
            num_nodes = known
        if num_nodes is None:
            num_nodes = 1 + max((int(ends.max()) for ends in (sources, targets) if ends.numel()), default=-1)
        sizes = num_nodes if isinstance(num_nodes, tuple) else (num_nodes, num_nodes)
        are_sizes = all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < MAX_NODES for size in sizes)
        if len(sizes) != 2 or not are_sizes:
            raise ArgumentError(f"num_nodes must be an integer in [1, 2**31), or one for either end, got {num_nodes!r}")
        for ends, size in ((sources, sizes[0]), (targets, sizes[1])):
            if ends.numel() and int(ends.max()) >= size:
                raise ArgumentError(f"num_nodes must be above all ids, got {num_nodes} and id {int(ends.max())}")
        self._sources, self._targets = (Nodes(size, None, None, self.device) for size in sizes)
        self._edges = EdgeSet(sources.to(self.device), targets.to(self.device), *sizes)

    def sample(self, req_num: int, trials_num: int = 5, padding: bool = False) -> Tensor:
        """Pairs that are no edge, int64 `[2, n]` on `device`, sources first; each call draws anew.

        Args:
            req_num: Pairs wanted.
            trials_num: How often a pair that is an edge is drawn anew.
            padding: Keep pairs that are still edges, so that n is `req_num`; else they are left out.

        Raises:
            ArgumentError: `req_num` is below 0 or `trials_num` below 1, or one is no integer.
        """
        if isinstance(req_num, bool) or not isinstance(req_num, int) or req_num < 0:
            raise ArgumentError(f"req_num must be an integer of at least 0, got {req_num!r}")
        if isinstance(trials_num, bool) or not isinstance(trials_num, int) or trials_num < 1:
            raise ArgumentError(f"trials_num must be an integer of at least 1, got {trials_num!r}")
        key = call_key(self.seed, self._num_calls)
        self._num_calls += 1
        drawn = draw_negatives(req_num, key, self._targets, sources=self._sources, until=None, edges=self._edges,
                               device=self.device, tries=trials_num)  # fmt: skip
        pairs = torch.stack([drawn.sources, drawn.targets])
        if drawn.num_edges and not padding:
            pairs = pairs[:, ~self._edges.contains(*pairs)]
        return pairs


def _read_pairs(graph: Any, edge_dir: str | None) -> tuple[Tensor, Tensor, int | None]:
    """(sources, targets, number of nodes where it is known)."""
    if not isinstance(graph, CSRTopo):
        edges = read_edges(graph, "graph")
        if isinstance(edges, EdgeList):
            return edges.edge_index[0], edges.edge_index[1], edges.num_nodes
        # Rows of sparse containers are targets, as in `adj_t`.
        graph, edge_dir = CSRTopo(indptr=edges.indptr, indices=edges.indices), "in"
    elif edge_dir is not None and graph.listed not in (None, edge_dir):
        raise ArgumentError(f"edge_dir must be what the rows of graph are, {graph.listed!r}, got {edge_dir!r}")
    rows = torch.arange(graph.node_count, device=graph.indptr.device).repeat_interleave(graph.degree)
    columns = graph.indices.to(rows.device)
    is_in = (edge_dir or graph.listed) == "in"
    return (columns, rows, graph.node_count) if is_in else (rows, columns, graph.node_count)
