"""`ShaDowKHopSampler`: a separate graph around every seed, after PyG's loader of that name, on the device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.loader import ShaDowKHopSampler as PygShaDowKHopSampler
from torch_geometric.sampler import SamplerOutput
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.kernels.batch_counters import MAX_HOPS
from pyg_direct.loader.node_loader import NodeLoader
from pyg_direct.loader.option_types import TorchOptions
from pyg_direct.ops.argument_checks import as_ids, check_flag, check_ids, checks_keywords
from pyg_direct.sampler.graph_reader import describe_other
from pyg_direct.sampler.keyed_sampler import Output
from pyg_direct.sampler.neighbor_sampler import NeighborSampler
from pyg_direct.typing import Device


# PyG's class comes first; otherwise PyG's `NodeLoader` would call its `__init__` as the next class's.
class ShaDowKHopSampler(PygShaDowKHopSampler, NodeLoader):  # type: ignore[misc]
    """Subgraphs around nodes (Zeng et al., NeurIPS 2021), after PyG's loader; torch-sparse is not needed.

    A batch is a PyG `Batch` on `device` with a graph for each seed. It has the edges among the nodes found in `depth`
    hops of `num_neighbors` neighbors. Nodes ascend within each graph. `root_n_id` has the positions of the seeds, `ptr`
    and `batch` the graph of each node. `n_id` and `e_id` are ids in the data; `y` is of the seeds alone. Edges are
    sorted by graph, source and target.

    Args:
        data: A `Data` with `edge_index` or `adj_t`; if it has both, its `edge_index` is sampled.
        depth: Number of hops.
        num_neighbors: Neighbors of a node per hop, -1 for all.
        node_idx: Seeds: ids, int32 or int64 `[S]`, a mask bool `[N]`, or None for all nodes.
        replace: Draw with replacement.
        device, placement, topology_placement, feature_cache, store_dtype, seed, prefetch: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> (batch,) = ShaDowKHopSampler(ring, 2, 1, torch.tensor([2, 0]), batch_size=2, device="cpu")
        >>> batch.n_id.tolist(), batch.batch.tolist(), batch.root_n_id.tolist()  # a subgraph for each seed
        ([0, 1, 2, 0, 2, 3], [0, 0, 0, 1, 1, 1], [2, 3])
    """

    _seeds_name = "node_idx"

    @checks_keywords
    def __init__(self, data: Data, depth: int, num_neighbors: int, node_idx: Tensor | None = None,
                 replace: bool = False, *, device: Device = None, placement: str = "auto",
                 topology_placement: str | None = None, feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 **kwargs: Unpack[TorchOptions]) -> None:  # fmt: skip
        if not isinstance(data, Data):
            raise ArgumentTypeError(f"data must be a Data, got {describe_other(data)}")
        if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= MAX_HOPS:
            raise ArgumentError(f"depth must be an integer in [0, {MAX_HOPS}], got {depth!r}")
        if data.edge_index is not None and "adj_t" in data:
            # Unlike its other loaders, PyG's then samples from `edge_index`, and batches have no `adj_t`.
            data = copy.copy(data)
            del data.adj_t
        self._settle(device, placement, topology_placement, feature_cache, 1, seed, prefetch)
        self.depth, self.num_neighbors, self.replace = depth, num_neighbors, check_flag("replace", replace)
        self._made_sampler = True
        sampler = NeighborSampler(data, [num_neighbors] * depth, "induced", self.replace, disjoint=True,
                                  device=device, placement=self.topology_placement, seed=self.seed)  # fmt: skip
        if "filter_per_worker" in kwargs:
            raise ArgumentTypeError(f"{type(self).__name__} has no option filter_per_worker: its collate_fn makes "
                                    "batches, as PyG's")  # fmt: skip
        # PyG's `collate_fn` makes batches.
        options = {**kwargs, "filter_per_worker": True}
        self._open_general(data, sampler, node_idx, None, None, None, None, None, store_dtype, options)
        self.node_idx = self.input_data.node

    def collate_fn(self, index: Any) -> Any:
        """Make the sample around the seeds at these positions, or its batch with `filter_per_worker` (PyG's hook).

        Args:
            index: Positions among the seeds, int64 `[B]` or a list.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: `index`, rule and value.
        """
        out = self._ask(check_ids("index", as_ids("index", index)).long(), None)
        return self.filter_fn(out) if self.filter_per_worker else out

    def _samples_together(self) -> bool:
        # Nodes are sorted by tree after each call.
        return False

    def _ask(self, positions: Tensor, key: int | None) -> Output:
        out = super()._ask(positions, key)
        assert isinstance(out, SamplerOutput)
        return _sort_by_tree(out)

    def _place_inputs(self, batch: Any, out: Output) -> None:
        """Write the positions of the graphs and their seeds."""
        sizes = torch.bincount(out.batch, minlength=out.metadata[0].numel())
        batch.ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        batch.root_n_id = out.metadata[2]
        if isinstance(batch.get("y"), Tensor) and self.data.is_node_attr("y"):
            batch.y = batch.y[batch.root_n_id]

    def _build(self, out: Output, memory: list[Any] | None = None, read: Any = None) -> Batch:
        made = super()._build(out, memory, read)
        batch = Batch(_base_cls=type(made))
        batch._store._mapping.update(made._store._mapping)
        # PyG's batches of graphs have none of these.
        for key in ("num_sampled_nodes", "num_sampled_edges"):
            batch._store._mapping.pop(key, None)
        return batch


def _sort_by_tree(out: SamplerOutput) -> SamplerOutput:
    """Sort a disjoint sample: nodes by tree and id, edges by source and target; and find the positions of the seeds."""
    order = out.node.sort(stable=True).indices
    order = order[out.batch[order].sort(stable=True).indices]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    row, col = place[out.row], place[out.col]
    by_source = col.sort(stable=True).indices
    by_source = by_source[row[by_source].sort(stable=True).indices]
    input_id, time = out.metadata
    return SamplerOutput(out.node[order], row[by_source], col[by_source], out.edge[by_source], out.batch[order],
                         metadata=(input_id, time, place[: input_id.numel()]))  # fmt: skip
