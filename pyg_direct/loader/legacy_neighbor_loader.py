"""`NeighborSampler`: PyG's old loader of layers, the predecessor of `NeighborLoader`, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader.neighbor_sampler import Adj as SparseLayer, EdgeIndex, NeighborSampler as PygNeighborSampler
from torch_geometric.typing import SparseTensor
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.arguments import TorchOptions, read_input_nodes, settle_workers
from pyg_direct.loader.base_loader import WholeBatchLoader, is_said_anew
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.ops.argument_checks import as_ids, check_callables, check_fanouts, check_flag, check_ids
from pyg_direct.sampler.keyed_sampler import OwnSampler, under_key
from pyg_direct.sampling.captured_plan import Finished
from pyg_direct.sampling.graphsage_sampler import Adj, GraphSageSampler
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.typing import Device

_MODES = {"auto": "auto", "cuda": "GPU", "unified": "UVA", "cpu": "CPU"}


class NeighborSampler(WholeBatchLoader, PygNeighborSampler):  # type: ignore[misc]
    """Layers around nodes, after PyG's old `NeighborSampler`: `(batch_size, n_id, adjs)`, outermost layer first.

    A layer is PyG's `EdgeIndex`, or `Adj` for a `SparseTensor`, and expands all nodes so far. With one layer `adjs` is
    this layer alone. Results are on `device`.

    Args:
        edge_index: Edges, int32 or int64 `[2, E]`, sources first, or a transposed `SparseTensor`; layers then hold one
            too.
        sizes: Fanout of each layer, from the seeds outwards; -1 takes all neighbors.
        node_idx: Seeds: ids, int32 or int64 `[S]`, a mask bool `[N]`, or None for all nodes.
        num_nodes: Number of nodes; None uses the highest id.
        return_e_id: Layers hold edge ids.
        transform: Called with `(batch_size, n_id, adjs)`.
        device: Device that samples and holds the results; None is the current GPU if there is one, otherwise the CPU.
        placement: Memory of the topology: `auto`, `cuda`, `unified` or `cpu`.
        seed: Seed of shuffling and of all draws; None takes it from torch's generator, see `NeighborLoader`.
        prefetch: Batches prepared ahead.
        ranks, uneven: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> edge_index = torch.tensor([[1, 2, 3], [0, 0, 1]])  # 1 and 2 lead to 0, 3 to 1
        >>> loader = NeighborSampler(edge_index, [-1, -1], torch.tensor([0]), batch_size=1, device="cpu")
        >>> batch_size, n_id, adjs = next(iter(loader))
        >>> n_id.tolist(), [adj.size for adj in adjs]  # outermost first
        ([0, 1, 2, 3], [(4, 3), (3, 1)])
    """

    transform_sampler_output = None

    def __init__(self, edge_index: Any, sizes: Sequence[int], node_idx: Tensor | None = None,
                 num_nodes: int | None = None, return_e_id: bool = True, transform: Callable[..., Any] | None = None, *,
                 device: Device = None, placement: str = "auto", seed: int | None = None, prefetch: int = 1,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", **kwargs: Unpack[TorchOptions]
                 ) -> None:  # fmt: skip
        if not isinstance(placement, str) or placement not in _MODES:
            raise ArgumentError(f"placement must be one of {', '.join(_MODES)}, got {placement!r}")
        self._settle(device, placement, None, None, 1, seed, prefetch, ranks, uneven)
        if node_idx is not None:
            # PyG's accepts ids of any shape.
            node_idx = read_input_nodes(node_idx.view(-1) if isinstance(node_idx, Tensor) else node_idx, "node_idx")
        check_callables(transform=transform)
        self.edge_index, self.node_idx, self.num_nodes = edge_index, node_idx, num_nodes
        self.sizes, self.return_e_id = check_fanouts("sizes", sizes), check_flag("return_e_id", return_e_id)
        # `EpochLoader` would call it with one argument.
        self.transform, self._transform = None, transform
        self.is_sparse_tensor = isinstance(edge_index, SparseTensor)
        self._values = edge_index.storage.value() if self.is_sparse_tensor else None
        if self.is_sparse_tensor:
            topology = CSRTopo(edge_index)
        else:
            if not isinstance(edge_index, Tensor):
                hint = ": give its edge_index" if isinstance(edge_index, Data) else ""
                raise ArgumentTypeError(
                    f"edge_index must be a tensor or a SparseTensor, got {type(edge_index).__name__}{hint}"
                )
            topology = CSRTopo(edge_index, num_nodes=_count_nodes(edge_index, node_idx, num_nodes))
        if node_idx is None:
            node_idx = torch.arange(topology.node_count, device="cpu")
        elif node_idx.dtype == torch.bool:
            node_idx = node_idx.nonzero().view(-1)
        self._nodes = check_ids("node_idx", node_idx.view(-1), topology.node_count).long().cpu()
        mode = "CPU" if self.device.type == "cpu" else _MODES[placement]
        self._sampler = GraphSageSampler(topology, self.sizes, self.device, mode, seed=self.seed)
        self._num_calls = 0
        options = settle_workers(type(self), kwargs, self.device, may_start=False)
        if not len(self._nodes):
            # torch refuses to shuffle an empty data set.
            options.pop("shuffle", None)
        DataLoader.__init__(self, range(len(self._nodes)), **options)  # type: ignore[arg-type]
        # torch's attribute would hide our method; our method as an attribute would be a cycle that keeps memory alive.
        del self.__dict__["collate_fn"]

    def collate_fn(self, batch: Tensor | Sequence[int]) -> Any:  # type: ignore[override]
        """Sample the layers around these nodes, for direct calls as on PyG's loader; see `sample`.

        Args:
            batch: Nodes, int64 `[B]` or a list.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: `batch`, rule and value.
        """
        return self.sample(batch)

    def sample(self, batch: Tensor | Sequence[int]) -> Any:
        """Sample the layers around these nodes; each call makes new draws.

        Args:
            batch: Nodes, int64 `[B]` or a list.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: `batch`, rule and value.
        """
        nodes = check_ids("batch", as_ids("batch", batch)).long()
        return self._draw(nodes, self._next_key())

    _next_key = OwnSampler._next_key

    def _draw(self, nodes: Tensor, key: int) -> Any:
        n_id, batch_size, layers = self._sampler.sample(nodes, key=key)
        adjs = [self._shape(layer) for layer in layers]
        out = (batch_size, n_id, adjs[0] if len(adjs) == 1 else adjs)
        return out if self._transform is None else self._transform(*out)

    def _shape(self, layer: Adj) -> Any:
        e_id = layer.e_id if self.return_e_id else None
        if not self.is_sparse_tensor:
            return EdgeIndex(layer.edge_index, e_id, layer.size)
        source, target = layer.edge_index
        # A `SparseTensor` is ordered by target and source; its own sort would permute parallel edges.
        order = (target * layer.size[0] + source).sort(stable=True).indices
        value = None if self._values is None else self._values.to(source.device)[layer.e_id[order]]
        adj_t = SparseTensor(row=target[order], col=source[order], value=value, sparse_sizes=layer.size[::-1],
                             is_sorted=True)  # fmt: skip
        return SparseLayer(adj_t, None if e_id is None else e_id[order], layer.size)

    def _prepare(self) -> None:
        return

    def _input(self) -> Tensor:
        return self._nodes

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        own = key.of_batch(number)
        if not is_said_anew(self, "sample"):
            return Finished(self._draw(seeds.nodes, own))
        with under_key(own):
            # A list, as from PyG.
            return Finished(self.sample(seeds.nodes.tolist()))

    def _is_own(self) -> bool:
        return self._transform is None and not is_said_anew(self, "sample")

    def _is_told_by_batches(self) -> bool:
        return not self._is_own() or self._values is not None

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        topology, place = self._sampler.csr_topo, self._sampler._topology.placement
        return [f"topology: {topology.node_count} nodes, {topology.edge_count} edges, {place}"], {}

    def _list_options(self) -> Iterator[str]:
        yield str(self.sizes)


def _count_nodes(edge_index: Tensor, node_idx: Tensor | None, num_nodes: int | None) -> int:
    """Count the nodes by PyG's rule."""
    if num_nodes is not None:
        return num_nodes
    if node_idx is not None and node_idx.dtype == torch.bool:
        return node_idx.numel()
    highest = [int(ids.max()) for ids in (edge_index, node_idx) if ids is not None and ids.numel()]
    return max(highest, default=-1) + 1
