"""`NeighborLoader`: PyG's loader with sampling and feature collection on the device that trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PygNeighborLoader, NodeLoader
from torch_geometric.sampler import NodeSamplerInput, SamplerOutput

from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning, PlacementWarning
from pyg_direct.graph.placed import PlacedTopology
from pyg_direct.graph.topology import CSRTopo
from pyg_direct.kernels.state import MAX_HOPS
from pyg_direct.loader.background import Background
from pyg_direct.loader.batches import Seeds, iterate_batches
from pyg_direct.loader.pipeline import Pipeline
from pyg_direct.loader.placement import announce, describe
from pyg_direct.loader.pyg import Attributes, Ranking, read_topology, summarise
from pyg_direct.loader.superbatch import SharedFetch, SharedRows, SuperBatch
from pyg_direct.loader.workers import Positions, WorkerSampler, number_items
from pyg_direct.ops.check import check_fanouts, check_ids
from pyg_direct.ops.neighbor import check_sampling
from pyg_direct.runtime.device import resolve_device
from pyg_direct.runtime.probe import choose_host_memory
from pyg_direct.runtime.size import parse_size
from pyg_direct.sampling.key import batch_key, call_key, resolve_seed
from pyg_direct.sampling.open import open_plan
from pyg_direct.sampling.plan import GpuPlan, Pending
from pyg_direct.sampling.sample import Recipe, Sample, check_hops
from pyg_direct.typing import Device

# A batch that shares no rows with others.
_ALONE: Mapping[str, SharedRows] = MappingProxyType({})
PLACEMENTS = ("auto", "cuda", "unified", "pinned", "cpu")
# Only workers need these; None and the defaults of torch are not worth a word.
_WORKER_OPTIONS = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "pin_memory": False,
                   "pin_memory_device": "", "worker_init_fn": None, "timeout": 0}  # fmt: skip


class NodeSampler:
    """What PyG's `NodeLoader` asks of a sampler; edge ids are final, so there is no permutation."""

    edge_permutation = None

    def __init__(self, loader: NeighborLoader) -> None:
        self._loader = loader

    @property
    def num_neighbors(self) -> list[int]:
        """Fanout of each hop."""
        return self._loader.num_neighbors

    def sample_from_nodes(self, index: NodeSamplerInput) -> SamplerOutput:
        """Sample around nodes, under the next key of the loader's direct calls."""
        seeds = index.node
        sample = self._loader._sample_now(seeds)
        input_id = torch.arange(seeds.numel()) if index.input_id is None else index.input_id
        return _to_output(sample, input_id)


class NeighborLoader(PygNeighborLoader):  # type: ignore[misc]
    """Mini-batches around seeds, after PyG's `NeighborLoader` (same arguments, same batches in form and order).

    A batch is a PyG `Data` on `device`, with node and edge attributes gathered there, and `n_id`, `e_id`, `input_id`,
    `batch_size`, `num_sampled_nodes`, `num_sampled_edges`. Nodes stand seeds first, then hop after hop. The batch
    number b of epoch e is a function of (`seed`, e, b) and the input nodes, equal on every device and placement.

    Args:
        data: A homogeneous `Data` with `edge_index` or `adj_t`. Edits before an epoch take effect in it.
        num_neighbors: Fanout of each hop; -1 takes all neighbors.
        input_nodes: Seeds: ids, a mask bool `[N]`, or None for all nodes.
        replace: Draw with replacement.
        transform: Called with every batch.
        transform_sampler_output: Called with PyG's `SamplerOutput` of every batch before features are fetched.
        filter_per_worker: Accepted; features are always fetched on the device.
        device: Where to sample and where batches are; None is the current GPU if there is one, else the CPU.
        placement: Where topology and attributes live: `cuda`, `unified` (host memory that the GPU reads in place),
            `pinned`, `cpu`, or `auto`: GPU memory for what fits there, first the topology, then attributes from the
            smallest on, so that a quarter of the free memory, and at least 8 GiB or half of it, is left to the model;
            host memory for the rest, `unified` or `pinned`, whichever a short measurement, kept on disk, found
            faster. Labels, masks and other short rows go to GPU memory in any case. The first epoch says what was
            chosen in one line of the logger `pyg_direct`, at level INFO.
        topology_placement: Where the topology lives, if not where `placement` says.
        feature_cache: With attributes on the host: GPU memory for the rows met most often, in bytes, as `"2G"`, or as
            a share of the rows such as `"20%"`. None takes what `placement="auto"` has left to give, else nothing.
        sampling: `uniform`, or `labor`, another sampler that moves fewer rows: nodes of a hop that list the same
            neighbors pick the same ones (LABOR-0 with sequential Poisson sampling; Balin & Catalyurek, NeurIPS 2023).
            A node has as many neighbors as with `uniform`, but a batch has fewer nodes. See "Estimates" below.
        layer_dependency: With `labor`: all hops of a batch share their draws too, for fewer nodes still.
        super_batch: With node attributes on the host of a GPU: batches whose rows are read together, each row once.
            Up to three times as many are in GPU memory; as many as fit a quarter of what is free there. The batches
            are those that come without, unless `transform_sampler_output` is given, with which each is read alone.
        seed: Seed of shuffling and of all draws; None takes torch's initial seed.
        prefetch: Batches made ahead; on a GPU one more is being sampled, on a CPU each is made by a thread of its own,
            with a share of the cores. 0 makes a batch when it is asked for. When GPU memory runs out over it, it
            shrinks, with a warning.
        **kwargs: Arguments of `torch.utils.data.DataLoader`. Workers are not needed and their options are absorbed,
            unless `multiprocessing_context` says how to start them: `"spawn"` gives processes that sample on the CPU.

    Estimates. With `labor` a node's k picks among its d > k neighbors are those with the smallest of d independent
    uniform draws, each belonging to a neighbor. So any k of them are equally likely, each is picked with chance k / d,
    and given the nodes that a hop expands, the mean over the picks has the expectation and the variance that it has
    with `uniform`: PyG's mean aggregation needs no weights, and a sum must be scaled by d / k, as with `uniform`.
    Other than with `uniform`: means of different nodes are correlated, so that a loss over a batch may vary more or
    less; with `layer_dependency`, nodes met in one hop are picked more often in the next, so that the estimate through
    several layers is biased by what their neighborhoods share; and parallel edges, whose source has one draw, are
    picked together, so that a node with parallel edges has a mean that is biased. `labor` reads every list of
    neighbors whole, O(degree) a node where `uniform` takes O(fanout): with a topology on the host, lists travel over
    the link, and what is saved in rows must outweigh them.

    Raises:
        ArgumentError, ArgumentTypeError, IdError, DeviceError: named argument, rule and value.
        NotImplementedError: an option of PyG's that is not supported yet, by name.
    """

    def __init__(self, data: Data, num_neighbors: Sequence[int], input_nodes: Any = None, input_time: Any = None,
                 replace: bool = False, subgraph_type: Any = "directional", disjoint: bool = False,
                 temporal_strategy: str = "uniform", time_attr: str | None = None, weight_attr: str | None = None,
                 transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, is_sorted: bool = False,
                 filter_per_worker: bool | None = None, neighbor_sampler: Any = None, directed: bool = True, *,
                 device: Device = None, placement: str = "auto", topology_placement: str | None = None,
                 feature_cache: int | str | None = None, sampling: str = "uniform", layer_dependency: bool = False,
                 super_batch: int = 1, seed: int | None = None, prefetch: int = 1, **kwargs: Any
                 ) -> None:  # fmt: skip
        _refuse_later_options(data=data, num_neighbors=num_neighbors, input_time=input_time,
                              subgraph_type=subgraph_type, disjoint=disjoint, temporal_strategy=temporal_strategy,
                              time_attr=time_attr, weight_attr=weight_attr, neighbor_sampler=neighbor_sampler,
                              directed=directed)  # fmt: skip
        topology_placement = placement if topology_placement is None else topology_placement
        places = {"placement": placement, "topology_placement": topology_placement}
        for name, place in places.items():
            if place not in PLACEMENTS:
                raise ArgumentError(f"{name} must be one of {', '.join(PLACEMENTS)}, got {place!r}")
        for name, count, least in [("prefetch", prefetch, 0), ("super_batch", super_batch, 1)]:
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ArgumentError(f"{name} must be an integer of at least {least}, got {count!r}")
        self.num_neighbors = check_fanouts("num_neighbors", num_neighbors)
        check_hops(self.num_neighbors, MAX_HOPS, "num_neighbors")
        self.device = resolve_device(device)
        for name, place in places.items():
            if (place == "cpu") != (self.device.type == "cpu") and place != "auto":
                raise ArgumentError(f"{name} must be one that device={self.device} can read, got {place!r}")
        parse_size(0 if feature_cache is None else feature_cache, 0, "feature_cache")
        self.placement, self.topology_placement = placement, topology_placement
        self.feature_cache, self.prefetch, self.super_batch = feature_cache, prefetch, super_batch
        self.seed = resolve_seed(seed)
        self.replace = bool(replace)
        check_sampling(sampling, self.replace, bool(layer_dependency))
        input_nodes = _read_input_nodes(input_nodes)
        num_seeds = data.num_nodes if input_nodes is None else len(input_nodes)
        if input_nodes is not None and input_nodes.dtype == torch.bool:
            if num_seeds != data.num_nodes:
                raise ArgumentError(f"input_nodes must have shape [{data.num_nodes}] as a mask, got [{num_seeds}]")
            num_seeds = int(input_nodes.sum())
        if num_seeds == 0:
            # torch refuses to shuffle nothing.
            kwargs.pop("shuffle", None)
        # Not PyG's own constructor, which makes its sampler; its class is what PyG's models ask loaders for.
        NodeLoader.__init__(self, data, NodeSampler(self), input_nodes, None, transform, transform_sampler_output,
                            False, **_settle_workers(kwargs, self.device))  # fmt: skip
        self.input_data.node = check_ids("input_nodes", self.input_data.node, int(data.num_nodes)).long().cpu()
        self._recipe = Recipe(tuple(self.num_neighbors), self.replace, sampling=sampling,
                              layer_dependency=bool(layer_dependency))  # fmt: skip
        self._plan: Any = None
        self._plan_topology: Any = None
        self._attributes: Attributes | None = None
        # The epoch that the next iteration runs and its first batch; and where the latest iteration stands.
        self._next_epoch = self._first_batch = 0
        self._standing = (0, 0)
        self._num_calls = 0

    def _prepare(self) -> Attributes:
        """Place what is not placed yet; reads `data` anew."""
        topology = read_topology(self.data, self.device)
        if self._plan is None or self._plan_topology is not topology:
            placed = self._place_topology(topology)
            self._plan, self._plan_topology, self._placed = open_plan(placed, self._recipe), topology, placed
        self._placed.check_process()
        self._attributes = Attributes(self.data, Ranking.of(self._placed), self.device, self.placement,
                                      self.feature_cache)  # fmt: skip
        if self.device.type == "cuda":
            announce(describe([summarise(topology, self._placed), *self._attributes.summarise()]))
        return self._attributes

    def _place_topology(self, topology: CSRTopo) -> PlacedTopology:
        try:
            return topology.place(self.topology_placement, self.device)
        except torch.OutOfMemoryError as error:
            if self.topology_placement != "auto":
                raise
            reason = str(error).split(".")[0]
        torch.cuda.empty_cache()
        host = choose_host_memory(self.device.index)
        warnings.warn(f"the topology goes to {host} memory, as GPU memory ran out: {reason}", PlacementWarning,
                      stacklevel=4)  # fmt: skip
        return topology.place(host, self.device)

    def _sample_now(self, seeds: Tensor) -> Sample:
        if self._attributes is None:
            self._prepare()
        key = call_key(self.seed, self._num_calls)
        self._num_calls += 1
        seeds = check_ids("index", seeds, int(self.data.num_nodes)).long()
        sample: Sample = self._plan.sample(seeds, key)
        return sample

    def __call__(self, index: Tensor | Sequence[int]) -> Any:
        """The batch around the input nodes at these positions; each call draws anew."""
        self._prepare()
        positions = torch.as_tensor(index).cpu().reshape(-1)
        if positions.dtype == torch.bool or positions.numel() == 0:
            positions = positions.nonzero().view(-1)
        positions = check_ids("index", positions, len(self.dataset)).long()
        return self._finish_batch(self._sample_now(self.input_data.node[positions]), positions)

    def _finish_batch(self, sample: Sample, positions: Tensor) -> Any:
        batch = self._build(sample, positions)
        return batch if self.transform is None else self.transform(batch)

    def filter_fn(self, out: SamplerOutput) -> Any:
        """The batch of a `SamplerOutput` of this loader's sampler (PyG's hook)."""
        attributes = self._attributes or self._prepare()
        if self.transform_sampler_output is not None:
            out = self.transform_sampler_output(out)
        batch = attributes.build(self.data, _from_output(out), out.metadata[0], checked=False)
        return batch if self.transform is None else self.transform(batch)

    def _submit(self, epoch: int, number: int, seeds: Seeds) -> Pending | Sample:
        submit = self._plan.submit if isinstance(self._plan, GpuPlan) else self._plan.sample
        pending: Pending | Sample = submit(seeds.nodes, batch_key(self.seed, epoch, number))
        return pending

    def _fetch(self, sample: Sample, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = _ALONE) -> Any:
        return self._build(sample, seeds.positions, shared)

    def _build(self, sample: Sample, positions: Tensor, shared: Mapping[str, SharedRows] = _ALONE) -> Any:
        assert self._attributes is not None
        input_id = positions if self.input_data.input_id is None else self.input_data.input_id[positions]
        if self.transform_sampler_output is not None:
            out = self.transform_sampler_output(_to_output(sample, input_id))
            sample, input_id = _from_output(out), out.metadata[0]
        return self._attributes.build(self.data, sample, input_id, checked=self.transform_sampler_output is None,
                                      shared=shared)  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or the rest of one that was resumed."""
        self._prepare()
        epoch, first = self._next_epoch, self._first_batch
        self._next_epoch, self._first_batch = epoch + 1, 0
        self._standing = (epoch, first)
        batches = iterate_batches(self, self.seed, epoch, first, self.input_data.node)
        work = self._work_with_workers if self.num_workers > 0 else self._work_here
        return self._iterate(epoch, first, work(epoch, batches))

    def _iterate(self, epoch: int, first: int, batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches, first + 1):
            result = batch if self.transform is None else self.transform(batch)
            self._standing = (epoch, number)
            yield result
        if self._standing[0] == epoch:
            self._standing = (epoch + 1, 0)

    def _work_here(self, epoch: int, batches: Iterator[tuple[int, Seeds]]) -> Iterator[Any]:
        submit = partial(self._submit, epoch)
        shares = self.super_batch > 1 and self.device.type == "cuda" and self.transform_sampler_output is None
        source: Background | Pipeline
        if self.device.type == "cpu" and self.prefetch > 0:
            # A function of the user's is called from one thread at a time.
            threads = None if self.transform_sampler_output is None else 1
            source = Background(batches, partial(self._make, epoch), self.prefetch, threads)
        elif shares and self._attributes is not None and self._attributes.on_host():
            group = SuperBatch(self.super_batch, submit, self._fetch, SharedFetch(self._attributes.on_host()))
            source = Pipeline(group.group(batches), group.submit, group.fetch, min(self.prefetch, 1), self.device)
        else:
            source = Pipeline(batches, submit, self._fetch, self.prefetch, self.device)
        try:
            for _, made in source:
                # A group's batches are forgotten one by one.
                ready = made if isinstance(made, list) else [made]
                while ready:
                    yield ready.pop(0)
        finally:
            source.close()
            if isinstance(source, Pipeline):
                # Memory that ran out once would run out in each epoch.
                self.prefetch = min(self.prefetch, source.prefetch)

    def _make(self, epoch: int, number: int, seeds: Seeds) -> Any:
        return self._fetch(self._submit(epoch, number, seeds).finish(), number, seeds)

    def _work_with_workers(self, epoch: int, batches: Iterator[tuple[int, Seeds]]) -> Iterator[Any]:
        worker = WorkerSampler(self._plan_topology.to_cpu(), self._recipe, self.seed, self.input_data.node)
        pool: Any = torch.utils.data.DataLoader(
            Positions(len(self.dataset)), collate_fn=worker, num_workers=self.num_workers,
            batch_sampler=list(number_items(batches, epoch)), multiprocessing_context=self.multiprocessing_context,
            timeout=self.timeout, worker_init_fn=self.worker_init_fn,
            prefetch_factor=self.prefetch_factor)  # fmt: skip
        for item, sample in pool:
            on_device = Sample(sample.n_id.to(self.device), sample.edge_index.to(self.device),
                               sample.e_id.to(self.device), sample.node_counts, sample.edge_counts)  # fmt: skip
            yield self._build(on_device, torch.tensor(list(item), dtype=torch.int64))

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: the next batch of the current epoch. Three integers, as all else follows."""
        return {"seed": self.seed, "epoch": self._standing[0], "batch": self._standing[1]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken: the next iteration gives the remaining batches of that epoch.

        Raises:
            ArgumentError: not a state of a loader.
        """
        for name in ("seed", "epoch", "batch"):
            value = state.get(name) if isinstance(state, dict) else None
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
                raise ArgumentError(f"state must hold {name!r} as an integer in [0, 2**64), got {value!r}")
        self.seed = state["seed"]
        self._next_epoch, self._first_batch = self._standing = (state["epoch"], state["batch"])

    def report(self) -> str:
        """What lives where, a line each."""
        attributes = self._attributes or self._prepare()
        lines = [f"topology: {self._plan_topology.node_count} nodes, {self._plan_topology.edge_count} edges, "
                 f"{self._placed.placement}"]  # fmt: skip
        lines += [f"{key}: {feature}" for key, feature in attributes.describe().items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _to_output(sample: Sample, input_id: Tensor) -> SamplerOutput:
    return SamplerOutput(node=sample.n_id, row=sample.edge_index[0], col=sample.edge_index[1], edge=sample.e_id,
                         num_sampled_nodes=sample.num_sampled_nodes, num_sampled_edges=sample.num_sampled_edges,
                         metadata=(input_id, None))  # fmt: skip


def _from_output(out: SamplerOutput) -> Sample:
    node_counts = list(torch.tensor(out.num_sampled_nodes or [0]).cumsum(0).tolist())
    edge_counts = [0, *torch.tensor(out.num_sampled_edges or [], dtype=torch.int64).cumsum(0).tolist()]
    edge_index = torch.stack([out.row, out.col])
    e_id = torch.empty(0, dtype=torch.int64, device=out.node.device) if out.edge is None else out.edge
    return Sample(out.node, edge_index, e_id, node_counts, edge_counts)


def _read_input_nodes(input_nodes: Any) -> Tensor | None:
    """Ids or a mask as a tensor; PyG would read a mask in NumPy or a list, or ids that are not whole, as ids."""
    if input_nodes is None:
        return None
    try:
        nodes = input_nodes if isinstance(input_nodes, Tensor) else torch.tensor(input_nodes)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"input_nodes must be ids or a mask, got {input_nodes!r}") from error
    if nodes.dim() != 1:
        raise ArgumentError(f"input_nodes must have one dimension, got shape {tuple(nodes.shape)}")
    return nodes if nodes.numel() > 0 or isinstance(input_nodes, Tensor) else nodes.long()


def _refuse_later_options(*, data: Any, num_neighbors: Any, **options: Any) -> None:
    if not isinstance(data, Data):
        kind = type(data).__name__
        if kind == "HeteroData" or isinstance(data, tuple):
            raise NotImplementedError(f"data={kind} is not supported yet, only a homogeneous Data")
        raise ArgumentTypeError(f"data must be a torch_geometric.data.Data, got {kind}")
    if isinstance(num_neighbors, dict) or type(num_neighbors).__name__ == "NumNeighbors":
        raise NotImplementedError(f"num_neighbors={type(num_neighbors).__name__} is not supported yet, only a list")
    defaults = {"input_time": None, "subgraph_type": "directional", "disjoint": False, "temporal_strategy": "uniform",
                "time_attr": None, "weight_attr": None, "neighbor_sampler": None, "directed": True}  # fmt: skip
    for name, value in options.items():
        plain = getattr(value, "value", value)
        # Arrays cannot be compared with a default.
        if type(plain) is not type(defaults[name]) or plain != defaults[name]:
            shown = repr(plain) if isinstance(plain, (str, bool)) else type(value).__name__
            raise NotImplementedError(f"{name}={shown} is not supported yet, only {defaults[name]!r}")


def _settle_workers(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments for DataLoader; options of workers are taken out, with one word about it, unless workers are meant."""
    context = kwargs.get("multiprocessing_context")
    method = context if isinstance(context, str) or context is None else context.get_start_method()
    if kwargs.get("num_workers", 0) > 0 and method is not None:
        if method != "spawn" and device.type == "cuda":
            raise ArgumentError(
                f"multiprocessing_context must be 'spawn' with device={device}, got {method!r}: GPU memory and unified "
                "memory cannot be used in forked processes"
            )
        return kwargs
    absorbed = {k: v for k, v in kwargs.items() if k in _WORKER_OPTIONS and v != _WORKER_OPTIONS[k]}
    if absorbed:
        given = ", ".join(f"{k}={v!r}" for k, v in absorbed.items())
        warnings.warn(
            f"{given}: not needed and not used, as sampling and features come from the device itself; worker processes "
            "start only with multiprocessing_context='spawn'",
            LoaderWarning, stacklevel=3)  # fmt: skip
    kept = {k: v for k, v in kwargs.items() if k not in _WORKER_OPTIONS and k != "multiprocessing_context"}
    return kept
