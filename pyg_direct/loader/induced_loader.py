"""Base of loaders whose batches are sets of nodes with the edges among them.

`RandomNodeLoader` takes a share of all nodes, `ClusterLoader` some clusters, GraphSAINT's samplers draw nodes.
`ShaDowKHopSampler`, after PyG's loader of that name, draws a separate graph around every seed. With types, a set is a
list of ids over the nodes of all types.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import ShaDowKHopSampler as PygShaDowKHopSampler
from torch_geometric.sampler import SamplerOutput
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError, whole_file
from pyg_direct.features.row_dtypes import check_store_dtype
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.hetero_topo import HeteroTopo
from pyg_direct.kernels.batch_counters import MAX_HOPS
from pyg_direct.loader.arguments import TorchOptions, settle_workers
from pyg_direct.loader.base_loader import ALONE, EpochLoader, is_said_anew
from pyg_direct.loader.batch_sampler import Seeds, can_share
from pyg_direct.loader.collate.data import Attributes, summarise
from pyg_direct.loader.collate.hetero_data import HeteroAttributes
from pyg_direct.loader.collate.stale_rows import Marks
from pyg_direct.loader.memory_placement import Placed
from pyg_direct.loader.node_loader import NodeLoader
from pyg_direct.loader.prefetch.batch_groups import GPU_ROOM, GrowingSets, SharedRows, Work
from pyg_direct.loader.prefetch.drivers import note_memory
from pyg_direct.nn.sorted_edges import register_sorted
from pyg_direct.ops.argument_checks import as_ids, check_flag, check_ids, checks_keywords
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.host.host_memory import available_bytes
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampler.graph_reader import count_nodes, describe_other, read_parts, refuse_features
from pyg_direct.sampler.keyed_sampler import Drawn, Output, to_general_output
from pyg_direct.sampler.neighbor_sampler import NeighborSampler
from pyg_direct.sampling.captured_plan import PendingOutput
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.induced_plan import InducedGroup, InducedPlan, PendingInducedGroup
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.sampling.sampling_options import GeneralRecipe, Sample
from pyg_direct.typing import Device

# Fields of a sample that batches of PyG's loaders of these names do not have.
_UNTOLD = ("n_id", "e_id", "num_sampled_nodes", "num_sampled_edges", "input_id")
# Key of the rows of `batch`; other loaders leave these rows out, and use the name for the tree of each node.
_TREES = "batch of the graph"
# Entries of the tables of a group, of four bytes each: a GPU clears them in 15 us.
_TABLE_ENTRIES = 1 << 24


class InducedLoader(EpochLoader):
    """Batches of subgraphs that sets of nodes induce in a `Data`.

    Subclasses choose the nodes of a batch (`_submit`), the topology (`_open_topology`) and the attributes of batches
    (`_show`).
    """

    data: Any
    transform = None
    transform_sampler_output = None
    store_dtype: torch.dtype | None = None
    _general: Any = None
    _plan: InducedPlan | None = None
    # The topology of the plan.
    _plan_topology: CSRTopo | None = None
    # Methods that a subclass of PyG's loader may override, and that ours does not call.
    _pyg_hooks: tuple[str, ...] = ()
    # Direction of the rows from which a batch's edges come.
    _direction = "in"
    # True if a GPU may find the subgraphs of several batches together (`_submit_group`).
    _makes_groups = False

    def _open_induced(self, data: Any, num_items: int, batch_size: int, device: Device, placement: str,
                      topology_placement: str | None, feature_cache: int | str | None,
                      store_dtype: torch.dtype | None, seed: int | None, prefetch: int, ranks: Any, uneven: str,
                      kwargs: Mapping[str, Any]) -> None:  # fmt: skip
        """Check the arguments and open torch's loader over `num_items` items."""
        self._check_pyg_hooks()
        self._settle(device, placement, topology_placement, feature_cache, 1, seed, prefetch, ranks, uneven)
        check_store_dtype(store_dtype)
        refuse_features(data)
        self.data, self.store_dtype = data, store_dtype
        if "filter_per_worker" in kwargs:
            raise ArgumentTypeError(f"{type(self).__name__} has no option filter_per_worker: its collate_fn makes "
                                    "batches, as PyG's")  # fmt: skip
        kwargs = settle_workers(type(self), kwargs, self.device, may_start=False, num_seeds=num_items)
        if kwargs.get("batch_sampler") is None:
            kwargs = {"batch_size": batch_size, **kwargs}
        self._items = torch.arange(num_items, device="cpu")
        # On the CPU, even if torch's default device is another.
        with torch.device("cpu"):
            DataLoader.__init__(self, range(num_items), collate_fn=self._collate_items, **kwargs)  # type: ignore[arg-type]

    def _open_topology(self) -> CSRTopo:
        """Return the rows from which edges of batches come; the same object as long as the graph has the same edges."""
        raise NotImplementedError

    def _show(self) -> Data:
        """Return the graph with the attributes of batches."""
        return self.data  # type: ignore[no-any-return]

    def _check_pyg_hooks(self) -> None:
        """Refuse hooks that would not be called."""
        for hook in self._pyg_hooks:
            if is_said_anew(self, hook):
                raise NotImplementedError(f"{hook} of {type(self).__qualname__} would not be called, as batches are "
                                          "made ahead: derive the class from PyG's loader")  # fmt: skip

    def _prepare(self) -> Any:
        # A hook may have been assigned since.
        self._check_pyg_hooks()
        topology = self._open_topology()
        if self._plan is None or self._plan_topology is not topology:
            self._plan = InducedPlan(topology.place(self.topology_placement, self.device), self._direction)
            self._plan_topology = topology
        self._renew_rows()
        return self._general

    def _summarise_places(self) -> Iterable[Placed] | None:
        if self._general is None:
            return None
        if self._plan is None or self._plan_topology is None:
            # Of a graph with types.
            return self._general.summarise()  # type: ignore[no-any-return]
        return [summarise(self._plan_topology, self._plan.topology), *self._general.summarise()]

    def _renew_rows(self) -> None:
        assert self._plan_topology is not None
        shown = self._show()
        if "batch" in shown._store._mapping:
            shown = copy.copy(shown)
            mapping = shown._store._mapping
            mapping[_TREES] = mapping.pop("batch")
        self._shown = shown
        counts = {"node": self._plan_topology.node_count, "edge": self._plan_topology.edge_count}
        self._general = Attributes(shown, None, self.device, self.placement, self.feature_cache, self.store_dtype,
                                   counts=counts)  # fmt: skip
        # Marks follow assignments to the user's graph, not to a copy of it.
        self._general.marks = Marks(self.data)

    def _rows(self) -> Any:
        return self._general

    def _input(self) -> Tensor:
        return self._items

    def _open_group(self, key: EpochKey) -> GrowingSets | None:
        # A sampler of the program may depend on when it is asked.
        is_chosen = self.prefetch == 1 and self._is_own() and can_share(self)  # type: ignore[arg-type]
        if not self._makes_groups or not is_chosen or self._plan is None or not runs_on_gpu(self._plan.lists.indptr):
            return None
        most = _TABLE_ENTRIES // max(1, self._count_entries())
        if most < 2 or self._plan.topology.num_nodes >= 2**31:
            return None
        count_free = partial(free_bytes, self.device.index) if self.device.type == "cuda" else available_bytes
        return GrowingSets(GPU_ROOM, count_free, most, partial(self._submit_group, key), self._read_group,
                           self._fetch_read)  # fmt: skip

    def _count_entries(self) -> int:
        """Count the entries of the table of a batch in a group."""
        assert self._plan is not None
        return self._plan.topology.num_nodes

    def _submit_group(self, key: EpochKey, work: Sequence[Work]) -> PendingInducedGroup:
        """Start to find the subgraphs of several batches."""
        raise NotImplementedError

    def _read_group(self, group: InducedGroup) -> list[tuple[dict[str, Tensor], list[Tensor]]]:
        """Read rows of several batches: (rows by attribute, the tensors that own their memory) of each."""
        rows, memory = self._general.read_group(group)
        return [(own, memory) for own in rows]

    def _fetch_read(self, sample: Sample, number: int, seeds: Seeds, read: tuple[dict[str, Tensor], list[Tensor]]
                    ) -> Data:  # fmt: skip
        """Make a batch of a group, of rows that were read already."""
        memory: list[Any] = []
        batch = self._build(sample, read[0], memory)
        if memory and self.device.type == "cuda":
            note_memory(batch, [*memory, *read[1]])
        return batch

    def _fetch(self, sample: Sample, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Data:
        return self._build(sample)

    def _build(self, sample: Sample, read: Mapping[str, Tensor] | None = None, memory: list[Any] | None = None) -> Data:
        """Build the batch of a sample, with PyG's attributes; `read` and `memory` as in `Attributes.build`."""
        none = sample.n_id[:0]
        # torch's idle threads spin for a while, in parallel with the loops that read features.
        with one_thread(self.device.type == "cpu"):
            batch: Data = self._general.build(self._shown, sample, none, counts_seeds=False, read=read, memory=memory)
        mapping = batch._store._mapping
        for key in _UNTOLD:
            if key not in self._shown._store._mapping:
                mapping.pop(key, None)
        if _TREES in mapping:
            mapping["batch"] = mapping.pop(_TREES)
        edge_index = mapping.get("edge_index")
        if self._direction == "in" and type(edge_index) is Tensor:
            register_sorted(edge_index, sample.num_sampled_nodes, sample.num_sampled_edges)
        return batch

    def _collate_items(self, index: Any) -> Any:
        """Make the batch of items at these positions, for direct calls of the program."""
        raise NotImplementedError

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        attributes = self._prepare() if self._general is None else self._general
        return [f"topology: {self._plan_topology}"], attributes.describe()

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        raise NotImplementedError


def load_saved(name: str, kind: str, path: Path, known: Sequence[type] = ()) -> Any:
    """Load a file of `save_whole` or PyG; only tensors and objects of known classes.

    Raises:
        ArgumentError: the file is damaged, or holds another object.
    """
    with whole_file(name, kind, path), torch.serialization.safe_globals(list(known)):
        try:
            return torch.load(path, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(str(error).partition("\n")[0]) from error


def save_whole(value: Any, path: Path) -> None:
    """Save a value atomically: readers see a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(value, written)
    written.replace(path)


class TypedInducedLoader(InducedLoader):
    """Batches of subgraphs that sets of nodes induce in a `Data` or a `HeteroData`.

    With types, a subclass calls `_note_types` first, and `_start_typed` in `_submit`; edges of batches are sorted by
    target.
    """

    _typed_plan: GeneralPlan | None = None

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Data | HeteroData]: ...

    def _note_types(self, data: Data | HeteroData) -> int:
        """Note the types of a graph with the numbers of their nodes; return the sum.

        Raises:
            ArgumentError: the number of nodes cannot be read from any attribute.
        """
        sizes = count_types(data)
        self._kinds = list(sizes)
        # First id of each type among all nodes, in PyG's numbering.
        self._type_begins = np.cumsum([0, *sizes.values()])
        return sum(sizes.values())

    def _check_nodes(self) -> None:
        """Check that the graph still has the same number of nodes."""
        sizes = count_types(self.data)
        if list(sizes) != self._kinds or np.any(np.cumsum([0, *sizes.values()]) != self._type_begins):
            raise ArgumentError(f"data must have the {self._type_begins[-1]} nodes that it had when the loader was "
                                f"made, got {sum(sizes.values())}: make a new one")  # fmt: skip

    def _prepare(self) -> Any:
        if isinstance(self.data, Data):
            return super()._prepare()
        self._check_nodes()
        topology = read_parts(self.data).open("in", False)
        if self._typed_plan is None or self._sampled_topology is not topology:
            placed = topology.place(self.topology_placement, self.device)
            self._typed_plan = GeneralPlan(placed, GeneralRecipe([], subgraph_type="induced"))
            self._sampled_topology: HeteroTopo | None = topology
        self._renew_rows()
        return self._general

    def _renew_rows(self) -> None:
        if isinstance(self.data, Data):
            super()._renew_rows()
        else:
            self._general = HeteroAttributes(self.data, self._sampled_topology, self.device, self.placement,
                                             self.feature_cache, self.store_dtype)  # fmt: skip

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        if isinstance(self.data, Data):
            return super()._list_places()
        attributes = self._prepare() if self._general is None else self._general
        return [f"topology: {self._sampled_topology}"], attributes.describe()

    def _start_typed(self, nodes: Tensor) -> PendingOutput:
        """Start to find the subgraph of nodes as PyG numbers them, all types in a row, int64 `[M]` on the CPU."""
        assert self._typed_plan is not None
        pending = self._typed_plan.submit_together([(self._split(nodes), None)], [0])
        return PendingOutput(pending, lambda samples: Drawn(to_general_output(samples[0], is_hetero=True)))

    def _split(self, nodes: Tensor) -> dict[str, Tensor]:
        """Split ids by type, and convert them to ids within their types, in the given order."""
        ids = nodes.numpy()
        owners = np.searchsorted(self._type_begins, ids, side="right") - 1
        by_type = np.argsort(owners, kind="stable")
        parts = np.split(ids[by_type], np.searchsorted(owners[by_type], np.arange(1, len(self._kinds))))
        return {kind: torch.from_numpy(part - begin)
                for kind, part, begin in zip(self._kinds, parts, self._type_begins, strict=False)}  # fmt: skip

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        return self._build_any(sample)

    def _build_any(self, made: Any) -> Any:
        """Build the batch of a sample, with types or without."""
        return self._build(made) if isinstance(made, Sample) else self._build_typed(made.out)

    def _build_typed(self, out: Output) -> HeteroData:
        memory: list[Any] = []
        batch: HeteroData = self._general.build(self.data, out, memory=memory)
        if memory and self.device.type == "cuda":
            note_memory(batch, memory)
        return batch


def count_types(data: Data | HeteroData) -> dict[str, int]:
    """Count the nodes of each type; a `Data` has one type without a name."""
    if isinstance(data, Data):
        return {"": count_nodes(data)}
    sizes = {store._key: store.num_nodes for store in data.node_stores}
    for kind, size in sizes.items():
        if size is None:
            raise ArgumentError(f"data must know the number of {kind!r} nodes; set data[{kind!r}].num_nodes")
    return {kind: int(size) for kind, size in sizes.items()}


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
