"""Batches of parts of a graph with the edges among them, after PyG's classes: `ClusterData` and `ClusterLoader`, and
`RandomNodeLoader` for random parts.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import (
    ClusterData as PygClusterData,
    ClusterLoader as PygClusterLoader,
    RandomNodeLoader as PygRandomNodeLoader,
)
from torch_geometric.loader.cluster import Partition
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.metis import assign_by_metis
from pyg_direct.loader.arguments import ShuffledOptions, TorchOptions
from pyg_direct.loader.base_loader import SavedAsPyg
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.induced_loader import TypedInducedLoader, count_types, load_saved, save_whole
from pyg_direct.loader.prefetch.batch_groups import Work
from pyg_direct.loader.sampler_loader import read_positions
from pyg_direct.object_text import show_options
from pyg_direct.ops.argument_checks import (
    check_choice,
    check_count,
    check_edge_list,
    check_flag,
    check_ids,
    checks_keywords,
)
from pyg_direct.ops.rows.upload import upload
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampler.graph_reader import count_nodes, describe_other, read_topology
from pyg_direct.sampling.induced_plan import PendingInducedGroup
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.typing import Device

_FORMATS = ("csr", "csc")
# Nodes of a batch up to which the host lists them for a GPU: this takes less time than five launches.
_NODES_ON_HOST = 1 << 14
# Nodes of a batch from which a CPU makes it ahead: with fewer, a thread's hand-over takes as long as the batch.
_NODES_AHEAD = 1000


class ClusterData(SavedAsPyg, PygClusterData):  # type: ignore[misc]
    """Clusters of a graph (Cluster-GCN, Chiang et al., KDD 2019), after PyG's `ClusterData`; `data[i]` is one of them.

    METIS runs by pymetis (extra `distributed`), without pyg-lib and torch-sparse; if pymetis is not installed, by PyG's
    METIS if it has one. METIS cuts few edges between clusters; both directions of an edge count. The attribute
    `partition` is PyG's, with permutations of nodes and edges, and files are PyG's too.

    In a `HeteroData` the nodes of all types are clustered together, and every relation counts. `partition` then covers
    all nodes and edges, type after type and relation after relation, and `data` is unchanged.

    Args:
        data: A `Data` or a `HeteroData` with `edge_index`.
        num_parts: Clusters, at least 1.
        recursive: Halve the graph repeatedly instead of making all clusters at once.
        save_dir: Folder that keeps the partition for later runs; None for none.
        filename: Name of its file there, `metis.pt` by default.
        log: Report on stderr that METIS runs.
        keep_inter_cluster_edges: Keep edges that lead out of the cluster in `data[i]`; not with types.
        sparse_format: `csr`: edges of clusters and batches are sorted by source, then target; `csc`: by target, then
            source, which accelerated models need not sort. With types, batches always have them by target.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value; a file of another graph.
        ModuleNotFoundError: neither pymetis nor PyG's METIS is installed.

    Example:
        >>> pairs = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]))
        >>> clusters = ClusterData(pairs, num_parts=2, log=False)
        >>> sorted(clusters.partition.node_perm.view(2, 2).tolist())
        [[0, 1], [2, 3]]
    """

    def __init__(self, data: Data | HeteroData, num_parts: int, recursive: bool = False, save_dir: str | None = None,
                 filename: str | None = None, log: bool = True, keep_inter_cluster_edges: bool = False,
                 sparse_format: str = "csr") -> None:  # fmt: skip
        edge_index, num_nodes = _join_types(data) if isinstance(data, HeteroData) else _check_data(data)
        check_choice("sparse_format", sparse_format, _FORMATS)
        self.num_parts, self.sparse_format = check_count("num_parts", num_parts), sparse_format
        self.recursive, log = check_flag("recursive", recursive), check_flag("log", log)
        self.keep_inter_cluster_edges = check_flag("keep_inter_cluster_edges", keep_inter_cluster_edges)
        if self.keep_inter_cluster_edges and isinstance(data, HeteroData):
            raise ArgumentError("keep_inter_cluster_edges must be False for a HeteroData, got True: its clusters have "
                                "nodes of their own alone")  # fmt: skip
        folder = f"part_{num_parts}{'_recursive' if self.recursive else ''}"
        path = Path(save_dir or "", folder, filename or "metis.pt")
        if save_dir is not None and path.exists():
            self.partition = load_saved("filename", "partition that ClusterData has saved", path, [Partition])
            self._check_file(path, num_nodes, edge_index.shape[1])
        else:
            if log:
                print("Computing METIS partitioning...", file=sys.stderr)
            self.partition = self._partition(edge_index, self._metis(edge_index, num_nodes))
            if save_dir is not None:
                save_whole(self.partition, path)
            if log:
                print("Done!", file=sys.stderr)
        self.data = data if isinstance(data, HeteroData) else self._permute_data(data, self.partition)

    def __getitem__(self, idx: int) -> Data | HeteroData:
        """Return a cluster by its number."""
        if not isinstance(self.data, HeteroData):
            return super().__getitem__(idx)
        nodes = self.partition.node_perm[int(self.partition.partptr[idx]) : int(self.partition.partptr[idx + 1])]
        chosen, first = {}, 0
        for kind, size in count_types(self.data).items():
            chosen[kind] = nodes[(nodes >= first) & (nodes < first + size)] - first
            first += size
        return self.data.subgraph(chosen)

    def _metis(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        """Compute the cluster of each node, int64 `[N]`."""
        has_other = torch_geometric.typing.WITH_METIS or torch_geometric.typing.WITH_TORCH_SPARSE
        if find_spec("pymetis") is None and has_other:
            return super()._metis(edge_index, num_nodes)
        source, target = edge_index.cpu().numpy()
        parts = assign_by_metis(lambda: iter([(source, target)]), num_nodes, self.num_parts, recursive=self.recursive,
                                what=type(self).__name__)  # fmt: skip
        return torch.from_numpy(parts).to(edge_index.device)

    def _check_file(self, path: Path, num_nodes: int, num_edges: int) -> None:
        """Check that a loaded partition is a partition of this graph."""
        found = self.partition
        rule = f"filename must be a partition of the {num_nodes} nodes and {num_edges} edges of data into " \
               f"{self.num_parts} clusters as {self.sparse_format}"  # fmt: skip
        way = f"delete {str(path)!r}, or give another save_dir or filename"
        if not isinstance(found, Partition):
            raise ArgumentError(f"{rule}, got {type(found).__name__}: {way}")
        sizes = found.node_perm.numel(), found.edge_perm.numel(), found.partptr.numel() - 1, found.sparse_format
        if sizes != (num_nodes, num_edges, self.num_parts, self.sparse_format):
            raise ArgumentError(f"{rule}, got one of {sizes[0]} nodes and {sizes[1]} edges into {sizes[2]} as "
                                f"{sizes[3]}: {way}")  # fmt: skip


class ClusterLoader(TypedInducedLoader, PygClusterLoader):  # type: ignore[misc]
    """Batches of clusters with all edges among their nodes, after PyG's `ClusterLoader`, on `device`.

    Without a `seed`, clusters are shuffled exactly as by PyG's loader under the same `torch.manual_seed`.

    Nodes are ordered by cluster; edges and attributes equal PyG's batches, in the same order. An edge between two
    clusters is in a batch if both are. Clusters of a `HeteroData` make batches with its types, edges by target.

    Args:
        cluster_data: A `ClusterData`, of PyG's or ours.
        device, placement, topology_placement, feature_cache, store_dtype, seed, ranks, uneven: See `NeighborLoader`.
        prefetch: Batches prepared ahead; None is 1. With 1, a GPU makes up to 16 batches together. On a CPU it is 0 for
            batches of fewer than 1,000 nodes: making one takes less time than a thread's hand-over.
        **kwargs: Arguments of `torch.utils.data.DataLoader`, such as `batch_size` in clusters and `shuffle`; options of
            workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        DeviceError: `device` is a GPU that does not exist.

    Example:
        >>> pairs = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]))
        >>> loader = ClusterLoader(ClusterData(pairs, num_parts=2, log=False), device="cpu")
        >>> [(batch.num_nodes, batch.edge_index.tolist()) for batch in loader]
        [(2, [[0, 1], [1, 0]]), (2, [[0, 1], [1, 0]])]
    """

    _pyg_hooks = ("_collate",)
    _orders_as_torch = True
    _makes_groups = True
    # Cluster of each node, int32 `[N]` on the GPU, from the first group of batches on.
    _owners: Tensor | None = None

    def __init__(self, cluster_data: PygClusterData, *, device: Device = None, placement: str = "auto",
                 topology_placement: str | None = None, feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int | None = None,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", **kwargs: Unpack[TorchOptions]
                 ) -> None:  # fmt: skip
        if not isinstance(cluster_data, PygClusterData):
            raise ArgumentTypeError(f"cluster_data must be a ClusterData, got {type(cluster_data).__name__}")
        self.cluster_data = cluster_data
        partition = cluster_data.partition
        self._begins = _read_begins(partition)
        if isinstance(cluster_data.data, HeteroData):
            self._open_types(cluster_data)
        else:
            self._topology = CSRTopo(indptr=partition.indptr, indices=partition.index)
            self._direction = "out" if partition.sparse_format == "csr" else "in"
            # A stand-in that shows which attributes belong to edges; batches take edges from the rows.
            last = max(0, self._topology.node_count - 1)
            self._edges = torch.full((2, 1), last, device="cpu").expand(2, self._topology.edge_count)
        if prefetch is None:
            size = kwargs.get("batch_size", 1)
            nodes = self._begins[-1] * (size if isinstance(size, int) else 1)
            is_small = nodes < _NODES_AHEAD * (len(self._begins) - 1)
            prefetch = int(not is_small or resolve_device(device).type == "cuda")
        self._open_induced(cluster_data.data, len(self._begins) - 1, 1, device, placement, topology_placement,
                           feature_cache, store_dtype, seed, prefetch, ranks, uneven, kwargs)  # fmt: skip

    _item = ("cluster", None)

    def _open_types(self, clusters: PygClusterData) -> None:
        """Note the types, and the nodes of all clusters, one after the other."""
        self._members, num_nodes = clusters.partition.node_perm.cpu(), self._note_types(clusters.data)
        if num_nodes != self._members.numel():
            raise ArgumentError(f"cluster_data.data must have the {self._members.numel()} nodes that it had when its "
                                f"clusters were made, got {num_nodes}: make them anew")  # fmt: skip

    def _open_topology(self) -> CSRTopo:
        return self._topology

    def _show(self) -> Data:
        shown = copy.copy(self.data)
        shown.edge_index = self._edges
        return shown

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        return self._start(seeds.positions)

    def _count_entries(self) -> int:
        return len(self._begins) - 1

    def _submit_group(self, key: EpochKey, work: Sequence[Work]) -> PendingInducedGroup:
        assert self._plan is not None
        if self._owners is None:
            numbers = np.arange(len(self._begins) - 1, dtype=np.int32)
            self._owners = upload(np.repeat(numbers, np.diff(self._begins)), self.device)
        return self._plan.submit_ranges(self._begins, self._owners, [seeds.positions.numpy() for _, seeds in work])

    def _start(self, clusters: Tensor) -> Any:
        """Start to find the subgraph of clusters."""
        chosen = clusters.numpy()
        begins = self._begins[chosen]
        sizes = self._begins[chosen + 1] - begins
        total = int(sizes.sum())
        if self._typed_plan is not None or self.device.type == "cpu" or total <= _NODES_ON_HOST:
            places = torch.from_numpy(np.repeat(begins - np.cumsum(sizes) + sizes, sizes) + np.arange(total))
            if self._typed_plan is not None:
                return self._start_typed(self._members[places])
            assert self._plan is not None
            return self._plan.submit(places)
        assert self._plan is not None
        # Nodes of a cluster are contiguous; shifting the batch's positions by cluster gives their ids.
        shifts, counts = upload(np.stack([begins - np.cumsum(sizes) + sizes, sizes]), self.device).unbind()
        nodes = shifts.repeat_interleave(counts, output_size=total)
        return self._plan.submit(nodes.add_(torch.arange(total, device=self.device)))

    def _collate(self, batch: Any) -> Data | HeteroData:
        """Make the batch of these clusters (PyG's hook).

        Args:
            batch: Numbers of clusters, int64 `[B]` or a list.
        """
        self._prepare()
        made: Data | HeteroData = self._build_any(self._start(read_positions(batch, len(self._begins) - 1)).finish())
        return made

    def _collate_items(self, index: Any) -> Data | HeteroData:
        return self._collate(index)


def _check_data(data: Any) -> tuple[Tensor, int]:
    """Check a graph for clustering, and return (edges, number of nodes)."""
    if not isinstance(data, Data):
        raise ArgumentTypeError(f"data must be a Data or a HeteroData, got {describe_other(data)}")
    if not isinstance(data.edge_index, Tensor):
        raise ArgumentTypeError(f"data.edge_index must be a tensor, got {type(data.edge_index).__name__}: clusters are "
                                "made of it")  # fmt: skip
    if "adj_t" in data:
        raise NotImplementedError("data with edge_index and adj_t: delete one of them")
    check_edge_list("data.edge_index", data.edge_index)
    num_nodes = count_nodes(data)
    check_ids("data.edge_index", data.edge_index.reshape(-1).cpu(), num_nodes)
    return data.edge_index, num_nodes


def _join_types(data: HeteroData) -> tuple[Tensor, int]:
    """Join (edges of all relations over the nodes of all types in order, int64 `[2, E]`; number of nodes)."""
    sizes = count_types(data)
    begins = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    joined: list[Tensor] = []
    for store in data.edge_stores:
        name, (source, _, target) = f"data[{store._key!r}].edge_index", store._key
        if "adj_t" in store:
            raise NotImplementedError(f"data[{store._key!r}] with adj_t: give edge_index")
        edges = store.get("edge_index")
        if not isinstance(edges, Tensor):
            raise ArgumentTypeError(f"{name} must be a tensor, got {type(edges).__name__}: clusters are made of it")
        check_edge_list(name, edges)
        for end, kind in enumerate((source, target)):
            if kind not in sizes:
                raise ArgumentError(f"data must know the number of {kind!r} nodes; set data[{kind!r}].num_nodes")
            check_ids(name, edges[end].cpu(), sizes[kind])
        firsts = torch.tensor([[begins[source]], [begins[target]]], device=edges.device)
        joined.append(edges.long() + firsts)
    none = torch.empty(2, 0, dtype=torch.int64, device="cpu")
    return torch.cat(joined, 1) if joined else none, sum(sizes.values())


def _read_begins(partition: Partition) -> np.ndarray:
    """Read the first node of each cluster, and the end of the last, int64 `[P + 1]` on the host."""
    begins = partition.partptr.cpu().numpy()
    num_nodes = partition.indptr.numel() - 1
    if begins.ndim != 1 or not len(begins) or begins[0] != 0 or begins[-1] != num_nodes or np.any(np.diff(begins) < 0):
        raise ArgumentError(f"cluster_data.partition.partptr must not decrease from 0 to the {num_nodes} nodes, got "
                            f"{begins.tolist()[:8]}")  # fmt: skip
    return begins.astype(np.int64)


class RandomNodeLoader(TypedInducedLoader, PygRandomNodeLoader):  # type: ignore[misc]
    """Batches of a share of all nodes, with all edges among them, after PyG's `RandomNodeLoader`, on `device`.

    With `shuffle=True` each epoch divides the nodes of all types differently. A batch has PyG's attributes; its nodes
    are in the order of the epoch, its edges by target. Without a `seed`, nodes are shuffled exactly as by PyG's loader
    under the same `torch.manual_seed`.

    Args:
        data: `Data` or `HeteroData`.
        num_parts: Batches per epoch, at least 1: each has ceil(nodes / num_parts) nodes, the last possibly fewer.
        device, placement, topology_placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven: See
            `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader` except `batch_size`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> loader = RandomNodeLoader(ring, num_parts=2, seed=0, device="cpu")
        >>> [batch.num_nodes for batch in loader]
        [2, 2]
    """

    @checks_keywords
    def __init__(self, data: Data | HeteroData, num_parts: int, *, device: Device = None, placement: str = "auto",
                 topology_placement: str | None = None, feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", **kwargs: Unpack[ShuffledOptions]
                 ) -> None:  # fmt: skip
        if not isinstance(data, (Data, HeteroData)):
            raise ArgumentTypeError(f"data must be a Data or a HeteroData, got {describe_other(data)}")
        self.num_parts = check_count("num_parts", num_parts)
        given: Mapping[str, Any] = kwargs
        if "batch_size" in given:
            raise ArgumentError(f"batch_size must not be given, as it follows from num_parts, got "
                                f"{given['batch_size']!r}")  # fmt: skip
        self.num_nodes = self._note_types(data)
        if self.num_nodes == 0:
            raise ArgumentError("data must have nodes, got none")
        self._open_induced(data, self.num_nodes, math.ceil(self.num_nodes / num_parts), device, placement,
                           topology_placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven,
                           kwargs)  # fmt: skip

    _item = ("node", None)
    _orders_as_torch = True
    _makes_groups = True

    def _list_options(self) -> Iterator[str]:
        yield from show_options(num_parts=self.num_parts)

    def _open_topology(self) -> CSRTopo:
        self._check_nodes()
        return read_topology(self.data, self.device)

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        return self._start(seeds.positions)

    def _submit_group(self, key: EpochKey, work: Sequence[Work]) -> PendingInducedGroup:
        assert self._plan is not None
        return self._plan.submit_sets([seeds.positions for _, seeds in work])

    def _start(self, nodes: Tensor) -> Any:
        """Start to find the subgraph of nodes in PyG's numbering, all types consecutively."""
        if self._typed_plan is not None:
            return self._start_typed(nodes)
        assert self._plan is not None
        return self._plan.submit(nodes)

    def _collate_items(self, index: Any) -> Any:
        """Make the batch of these nodes (PyG's hook).

        Args:
            index: Nodes in PyG's numbering, all types consecutively, int64 `[B]` or a list.
        """
        self._prepare()
        return self._build_any(self._start(read_positions(index, self.num_nodes)).finish())
