"""`NodeLoader`: batches around nodes by any sampler, with rows fetched on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader as PygNodeLoader
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, NodeSamplerInput
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.row_dtypes import check_store_dtype
from pyg_direct.loader.arguments import TorchOptions, check_custom_cls, check_stores, read_input_nodes, settle_workers
from pyg_direct.loader.base_loader import ALONE, EpochLoader
from pyg_direct.loader.batch_sampler import FEW_SEEDS, Seeds
from pyg_direct.loader.hot_row_ranking import SeedDraw
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.loader.prefetch.processes import Positions, WorkerSampler, number_items
from pyg_direct.loader.sampler_loader import GeneralLoader, is_uniform
from pyg_direct.nn.sorted_edges import register_hops
from pyg_direct.ops.argument_checks import check_callables, check_ids, check_integers, in_short, tell_kind
from pyg_direct.runtime.host.tensor_views import LazyDict
from pyg_direct.sampler.graph_reader import Graph, InputNodes, check_graph, count_nodes, list_relations, settle_filter
from pyg_direct.sampler.keyed_sampler import Output, OwnSampler, ask, check_sampler, device_for, to_output
from pyg_direct.sampler.neighbor_sampler import has_windows
from pyg_direct.sampling.captured_plan import Finished, PendingOutput
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.sampling.sampling_options import Sample
from pyg_direct.typing import Device


class NodeLoader(GeneralLoader, PygNodeLoader):  # type: ignore[misc]
    """Batches around nodes, after PyG's `NodeLoader`, on `device`.

    Args:
        data: `Data`, `HeteroData` or (`FeatureStore`, `GraphStore`); the second may be None if the sampler has the
            edges.
        node_sampler: A `pyg_direct.sampler.NeighborSampler`, or any sampler with PyG's interface.
        input_nodes: Seeds: ids, int32 or int64 `[S]`, a mask bool `[N]`, or None for all; (type, seeds) on a graph with
            types.
        input_time: A time for each seed, integers `[S]`.
        input_start_time, input_end_time: A window for each seed instead, integers `[S]` each. Only neighbors from its
            start to its end, both included, are sampled, in every hop; before its end if the sampler compares by `<`.
            Batches hold them as `seed_start_time` and `seed_time`.
        transform: Called with every batch.
        transform_sampler_output: Called with the sampler's output before rows are fetched.
        filter_per_worker: Return type of a direct call of `collate_fn`: True for batches, as PyG's on a CPU by default;
            False for the input of `filter_fn`.
        custom_cls: Class of the batches of a graph in stores.
        input_id: An id for each seed, `[S]` of any dtype, that batches hold instead of its position.
        device, placement, feature_cache, store_dtype, seed, prefetch, ranks, uneven, ahead: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> from pyg_direct.sampler import NeighborSampler
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> sampler = NeighborSampler(ring, [-1, -1], device="cpu")
        >>> (batch,) = NodeLoader(ring, sampler, torch.tensor([2]), device="cpu")
        >>> batch.n_id.tolist(), batch.edge_index.tolist()
        ([2, 1, 0], [[1, 2], [0, 1]])
    """

    # Names of the arguments in messages.
    _sampler_name, _seeds_name = "node_sampler", "input_nodes"

    def __init__(self, data: Graph, node_sampler: BaseSampler, input_nodes: InputNodes = None,
                 input_time: Tensor | None = None, transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, filter_per_worker: bool | None = None,
                 custom_cls: Any = None, input_id: Tensor | None = None, *, device: Device = None,
                 placement: str = "auto", feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad",
                 input_start_time: Tensor | None = None, input_end_time: Tensor | None = None,
                 ahead: int | str | None = None, **kwargs: Unpack[TorchOptions]) -> None:  # fmt: skip
        input_time = join_windows("input_time", input_time, input_start_time, input_end_time)
        device = device_for(device, node_sampler)
        self._settle(device, placement, None, feature_cache, None, seed, prefetch, ranks, uneven, ahead)
        options = {**kwargs, "filter_per_worker": settle_filter(filter_per_worker, data)}
        self._open_general(data, node_sampler, input_nodes, input_time, transform, transform_sampler_output,
                           custom_cls, input_id, store_dtype, options)  # fmt: skip

    def _open_general(self, data: Any, node_sampler: Any, input_nodes: Any, input_time: Any, transform: Any,
                      transform_sampler_output: Any, custom_cls: Any, input_id: Any, store_dtype: torch.dtype | None,
                      kwargs: Mapping[str, Any]) -> None:  # fmt: skip
        """Check the inputs and pass them to PyG's loader."""
        check_sampler(self._sampler_name, node_sampler, "sample_from_nodes")
        check_callables(transform=transform, transform_sampler_output=transform_sampler_output, custom_cls=custom_cls)
        check_store_dtype(store_dtype)
        check_stores(data, store_dtype=store_dtype, feature_cache=self.feature_cache)
        check_custom_cls(data, custom_cls)
        self.store_dtype = store_dtype
        check_graph(data, is_sampled=False)
        input_nodes, num_seeds = _read_seeds(data, input_nodes, self._seeds_name)
        size = _count_known(node_sampler, input_nodes, self._seeds_name)
        check_times("input_time", input_time, num_seeds, windows=True)
        check_input_id(input_id, num_seeds)
        kwargs = settle_workers(type(self), kwargs, self.device, may_start=is_uniform(node_sampler),
                                num_seeds=num_seeds)  # fmt: skip
        # Ids of all nodes are on the CPU, even if torch's default device is another.
        with torch.device("cpu"):
            PygNodeLoader.__init__(self, data, node_sampler, input_nodes, input_time, transform,
                                   transform_sampler_output, custom_cls=custom_cls, input_id=input_id,
                                   **kwargs)  # fmt: skip
        given = self.input_data
        given.node = check_ids(self._seeds_name, given.node, size).long().cpu()
        check_times("input_time", given.time, given.node.numel(), windows=True)
        # On the CPU, as the positions that index them.
        given.time, given.input_id = (None if own is None else own.cpu() for own in (given.time, given.input_id))

    @property
    def _item(self) -> tuple[str, str | None]:  # type: ignore[override]
        kind = self.input_data.input_type
        return ("seed" if kind is None else f"{kind} seed"), None

    @property
    def _sampler(self) -> Any:
        return self.node_sampler

    def _input(self) -> Tensor:
        nodes, times = self.input_data.node, self.input_data.time
        # Both are looked up for a whole epoch at once if this takes little memory.
        is_pair = times is not None and times.dim() == 1 and times.dtype == torch.int64 and len(nodes) <= FEW_SEEDS
        return torch.stack([nodes, times], 1) if is_pair and self._samples_together() else nodes

    def _list_draws(self) -> list[SeedDraw]:
        return [SeedDraw(self.input_data.input_type, self.batch_size or 1, self.input_data.node)]

    def _check_seeds(self, sizes: Any) -> None:
        size = sizes.get(self.input_data.input_type) if isinstance(sizes, dict) else sizes
        self._check_inputs(**{self._seeds_name: (self.input_data.node, size)})

    def _ask(self, positions: Tensor, key: int | None) -> Output:
        out: Output = ask(self._sampler, "sample_from_nodes", key, self.input_data[positions])
        return out

    def _open_plan(self) -> Any:
        # Batches hold the times that are given, also of a sampler without times.
        has_plan = is_uniform(self._sampler) and isinstance(self.data, Data) and self.input_data.time is None
        return self._sampler.open_plan() if has_plan else None

    def _list_seeds(self, seeds: Seeds) -> Tensor:
        return seeds.nodes

    def _build_sample(self, sample: Sample, positions: Tensor, shared: Mapping[str, SharedRows] = ALONE,
                      memory: list[Any] | None = None) -> Any:  # fmt: skip
        known = self.input_data.input_id
        input_id = positions if known is None else known.index_select(0, positions)
        if not EpochLoader._is_own(self):
            out = to_output(sample, input_id)
            return self.filter_fn(out) if self._is_filtered else self._build(out)
        more = {"shared": shared} if shared else {}
        batch = self._general.build(self.data, sample, input_id, memory=memory, **more)
        store = batch._store._mapping
        store.pop("seed_time", None)
        register_hops(batch, store["num_sampled_nodes"], store["num_sampled_edges"], sample.max_degree)
        return batch

    def _shared(self) -> Mapping[str, Any]:
        return {} if self._plan is None else self._general.on_host()

    def _work_with_workers(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]]) -> Iterator[Any]:
        if self._plan is None:
            # The program has assigned its own sampler, or others of its options, since.
            yield from self._work_here(key, batches)
            return
        worker = WorkerSampler(self._sampled_topology.to_cpu(), self._plan.recipe, key, self.input_data.node)
        pool: Any = torch.utils.data.DataLoader(
            Positions(len(self.dataset)), collate_fn=worker, num_workers=self.num_workers,
            batch_sampler=list(number_items(batches)), multiprocessing_context=self.multiprocessing_context,
            timeout=self.timeout, worker_init_fn=self.worker_init_fn, prefetch_factor=self.prefetch_factor,
            generator=torch.Generator().manual_seed(key.of_order() % 2**63))  # fmt: skip
        # On the generator's device, even if torch's default device is another.
        with torch.device("cpu"):
            samples = iter(pool)
        for item, sample in samples:
            on_device = Sample(sample.n_id.to(self.device), sample.edge_index.to(self.device),
                               sample.e_id.to(self.device), sample.node_counts, sample.edge_counts,
                               max_degree=sample.max_degree)  # fmt: skip
            self._current_rows()
            yield self._build_sample(on_device, torch.tensor(list(item), dtype=torch.int64, device="cpu"))

    def _submit_to_sampler(self, seeds: Sequence[Seeds], keys: Sequence[int]) -> PendingOutput | Finished:
        pending: PendingOutput | Finished = self._sampler.submit_together(self._list_inputs(seeds), keys)
        return pending

    def _list_inputs(self, seeds: Sequence[Seeds]) -> list[NodeSamplerInput]:
        """List the sampler's inputs for several batches."""
        given = self.input_data
        inputs = []
        for own in seeds:
            nodes, time, input_id = own.nodes, given.time, own.positions
            if nodes.dim() == 2:
                nodes, time = nodes.t().contiguous().unbind()
            elif time is not None:
                # Not by indexing, which wakes torch's threads for a few thousand items.
                time = time.index_select(0, input_id)
            if given.input_id is not None:
                input_id = given.input_id.index_select(0, input_id)
            inputs.append(NodeSamplerInput(input_id, nodes, time, given.input_type))
        return inputs

    def _place_inputs(self, batch: Any, out: Output) -> None:
        kind, (input_id, time) = self.input_data.input_type, out.metadata[:2]
        time, start = time if time is None else time.to(self.device), None
        if time is not None and time.dim() == 2:
            start, time = time.t().contiguous().unbind()
        # Its memory belongs to the batch.
        out.metadata = (input_id, time, *out.metadata[2:])

        def write(store: Any) -> None:
            # PyG's own setter takes as long as the launch of a kernel.
            mapping = store._mapping
            if start is not None:
                mapping["seed_start_time"] = start
            mapping["input_id"], mapping["seed_time"], mapping["batch_size"] = input_id, time, input_id.numel()
            if time is None:
                del mapping["seed_time"]

        if not isinstance(batch, HeteroData):
            write(batch[kind] if isinstance(out, HeteroSamplerOutput) else batch._store)
            return
        known = batch._node_store_dict
        if type(known) is LazyDict and kind in self.data._node_store_dict:
            known.when_made(lambda made: write(made[kind]))
        else:
            write(known[kind] if kind in known else batch[kind])


def join_windows(name: str, times: Any, start: Any, end: Any, time_window: int | None = None) -> Any:
    """Return times of seeds, or their windows: the earliest and the latest time of each, integers `[S, 2]`.

    Args:
        times: Times of the seeds, returned if there are no windows.
        start: Earliest times, integers `[S]`.
        time_window: Length of the window of all seeds, which cannot be combined with separate windows.
    """
    if start is None and end is None:
        if has_windows(times):
            raise ArgumentError(f"{name} must have one dimension, with one for each seed, got shape "
                                f"{tuple(times.shape)}: windows are input_start_time and input_end_time")  # fmt: skip
        return times
    if start is None or end is None:
        missing, given = ("start", "end") if start is None else ("end", "start")
        raise ArgumentError(f"input_{missing}_time must be given with input_{given}_time, got None")
    for other, value in ((name, times), ("time_window", time_window)):
        if value is not None:
            raise ArgumentError(f"{other} must be None beside input_start_time and input_end_time, which say for each "
                                f"seed what is sampled, got {in_short(value)}")  # fmt: skip
    check_times("input_end_time", end, None)
    if end.dim() != 1:
        raise ArgumentError(f"input_end_time must have one dimension, got shape {tuple(end.shape)}")
    check_times("input_start_time", start, len(end))
    return torch.stack([start.long(), end.long()], 1)


def check_times(name: str, times: Any, count: int | None, windows: bool = False) -> None:
    """Check times of seeds: integers, one for each if their number is known; or windows, two for each."""
    if times is None:
        return
    if windows and has_windows(times):
        # `join_windows` has checked windows except for their number.
        check_times("input_start_time", times[:, 0], count)
        return
    if not isinstance(times, Tensor) or times.is_floating_point() or times.is_complex() or times.dtype == torch.bool:
        kind = times.dtype if isinstance(times, Tensor) else type(times).__name__
        raise ArgumentTypeError(f"{name} must be a tensor of integers, got {kind}")
    check_integers(name, times)
    if count is not None and times.shape != (count,):
        raise ArgumentError(f"{name} must have shape ({count},), one for each seed, got {tuple(times.shape)}")


def check_input_id(input_id: Any, count: int | None) -> None:
    """Check ids that batches hold in place of positions: a tensor, one for each seed if their number is known."""
    if input_id is None:
        return
    if not isinstance(input_id, Tensor):
        raise ArgumentTypeError(f"input_id must be a tensor, got {type(input_id).__name__}")
    if input_id.dim() == 0 or (count is not None and len(input_id) != count):
        raise ArgumentError(f"input_id must have an id for each of the {count} seeds, got {tuple(input_id.shape)}")


def _read_seeds(data: Any, input_nodes: Any, name: str) -> tuple[Any, int | None]:
    """Read (input nodes in PyG's form, as tensors; their number, None if only a store knows it)."""
    if isinstance(data, Data):
        nodes = read_input_nodes(input_nodes, name)
        return nodes, count_seeds(nodes, count_nodes(data), name)
    has_type = isinstance(input_nodes, (tuple, list)) and len(input_nodes) == 2 and isinstance(input_nodes[0], str)
    kind = input_nodes[0] if has_type else input_nodes
    is_typed = isinstance(data, HeteroData)
    has_types = is_typed or list_relations(data[1]) != [None]
    if input_nodes is None and not has_types:
        raise ArgumentTypeError("input_nodes must be ids or a mask for a graph without types in stores, got None")
    if has_types and (not isinstance(kind, str) or (has_type and isinstance(input_nodes[1], str))):
        if is_typed and isinstance(kind, tuple) and kind in data.edge_types:
            raise ArgumentTypeError(f"input_nodes must be a node type or (node type, nodes), got the relation {kind}: "
                                    "LinkNeighborLoader samples around links")  # fmt: skip
        raise ArgumentTypeError(_tell_several(input_nodes) or _tell_untyped("input_nodes", input_nodes))
    if is_typed and kind not in data.node_types:
        raise ArgumentError(f"input_nodes must name a known node type, got {kind!r} of {data.node_types}")
    if has_type:
        nodes = read_input_nodes(input_nodes[1], f"input_nodes of {kind!r}", kind)
    else:
        nodes = None if isinstance(kind, str) else read_input_nodes(kind)
    if nodes is None and not is_typed and data[1] is None:
        raise ArgumentError(f"input_nodes must have ids where data has no GraphStore to count nodes, got {input_nodes}")
    num_nodes = data[kind].num_nodes if is_typed else None
    if is_typed and nodes is None and num_nodes is None:
        raise ArgumentError(f"data must know the number of {kind!r} nodes to take all as seeds; set "
                            f"data[{kind!r}].num_nodes")  # fmt: skip
    count = count_seeds(nodes, num_nodes, f"input_nodes of {kind!r}" if has_type else "input_nodes")
    # PyG's loader does not find the size of a type in stores for (type, None).
    return nodes if not isinstance(kind, str) else kind if nodes is None else (kind, nodes), count


def _tell_untyped(name: str, seeds: Any) -> str:
    """Return the error text for seeds without a node type."""
    hint = "" if seeds is None else ": name the type that they are of"
    return f"{name} must be a node type or (node type, nodes) for a graph with types, got {tell_kind(seeds)}{hint}"


def _tell_several(seeds: Any) -> str | None:
    """Return the error text for several node types, with or without nodes, or for one in a list; None for other
    values.
    """
    if isinstance(seeds, (set, frozenset, Mapping)):
        seeds = list(seeds)
    if not isinstance(seeds, (list, tuple)) or not seeds:
        return None
    kinds = [item[0] if isinstance(item, (list, tuple)) and item else item for item in seeds]
    if not all(isinstance(kind, str) for kind in kinds):
        return None
    way = f"give {kinds[0]!r} or ({kinds[0]!r}, nodes)" if len(kinds) == 1 else (
        "make a loader for each, and go over several together with zip(first, second)")  # fmt: skip
    return f"input_nodes must be one node type or one (node type, nodes), got {in_short(kinds)}: {way}"


def _count_known(sampler: Any, seeds: Any, name: str) -> int | None:
    """Count the nodes that a sampler of ours has of the seeds' type; seeds are in the form of `_read_seeds`."""
    if not isinstance(sampler, OwnSampler):
        return None
    kind, nodes = (seeds, None) if isinstance(seeds, str) else seeds if isinstance(seeds, tuple) else (None, seeds)
    sizes = sampler.num_nodes
    if isinstance(sizes, dict) and kind is None:
        raise ArgumentTypeError(_tell_untyped(name, seeds))
    if isinstance(sizes, dict) and kind not in sizes:
        raise ArgumentError(f"{name} must name a known node type, got {kind!r} of {list(sizes)}")
    size = sizes[kind] if isinstance(sizes, dict) else sizes
    count_seeds(nodes, size, name)
    return size


def count_seeds(nodes: Tensor | None, num_nodes: int | None, name: str = "input_nodes") -> int | None:
    """Count the seeds; a mask must have the length of all nodes."""
    if nodes is None:
        return num_nodes
    if nodes.dtype != torch.bool:
        return nodes.numel()
    if num_nodes is not None and nodes.numel() != num_nodes:
        raise ArgumentError(f"{name} must have shape [{num_nodes}] as a mask, got [{nodes.numel()}]")
    return int(nodes.sum())
