"""`NeighborLoader`: PyG's loader with sampling and feature collection on the device that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.sampler import NodeSamplerInput, NumNeighbors, SamplerOutput

from pyg_direct.errors import ArgumentError, PlacementWarning, warn
from pyg_direct.features.row_dtypes import check_store_dtype
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.placed_topology import ListReads, PlacedTopology
from pyg_direct.kernels.batch_counters import MAX_HOPS
from pyg_direct.loader.arguments import (
    check_custom_cls,
    check_stores,
    is_plain,
    read_input_nodes,
    settle_sharing,
    settle_workers,
)
from pyg_direct.loader.base_loader import ALONE, EpochLoader
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.collate.data import Attributes, summarise
from pyg_direct.loader.hot_row_ranking import check_ranking, rank_edges, rank_rows
from pyg_direct.loader.memory_placement import describe, keep_once
from pyg_direct.loader.node_loader import NodeLoader, check_input_id, count_seeds, join_windows, open_loader
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.loader.prefetch.gpu_streams import note_memory
from pyg_direct.loader.prefetch.processes import Positions, WorkerSampler, number_items
from pyg_direct.loader.sampler_loader import note_sample, read_positions
from pyg_direct.nn.sorted_edges import register_hops
from pyg_direct.ops.argument_checks import check_callables, check_fanouts, check_flag, check_ids
from pyg_direct.ops.content_hash import glance_only
from pyg_direct.ops.sampling.uniform import check_sampling
from pyg_direct.progress import announce
from pyg_direct.runtime.cuda.host_memory_probe import choose_host_memory
from pyg_direct.runtime.host.memory import parse_size
from pyg_direct.sampler.graph_reader import check_graph, count_nodes, read_topology, settle_filter
from pyg_direct.sampler.keyed_sampler import (
    Drawn,
    check_is_used,
    check_output,
    device_for,
    take_key,
    to_output,
    under_key,
)
from pyg_direct.sampler.neighbor_sampler import NeighborSampler, check_choices
from pyg_direct.sampling.captured_plan import Pending
from pyg_direct.sampling.plan_factory import open_plan
from pyg_direct.sampling.random_key import EpochKey, call_key
from pyg_direct.sampling.sampling_options import Recipe, Sample, check_hops
from pyg_direct.sampling.uniform_gpu import GpuPlan
from pyg_direct.typing import Device


class NeighborLoader(NodeLoader, PygNeighborLoader):  # type: ignore[misc]
    """Mini-batches around seeds, after PyG's `NeighborLoader` (same arguments, same batches in form and order).

    A batch is a PyG `Data` or `HeteroData` on `device`, with node and edge attributes gathered there, and `n_id`,
    `e_id`, `input_id`, `batch_size`, `num_sampled_nodes`, `num_sampled_edges`. Nodes stand seeds first, then hop after
    hop. The batch number b of epoch e is a function of (`seed`, e, b) and the input nodes, or without a `seed` of what
    was drawn for the epoch, b and the input nodes, equal on every device and placement. Sampling a `Data` uniformly is
    one captured CUDA graph; the other options take several launches a hop.

    Args:
        data: A `Data` or `HeteroData` with `edge_index` or `adj_t`, or (`FeatureStore`, `GraphStore`). Edits before an
            epoch take effect in it, rows that are written while it runs in its next batch; see "Edits" below, also for
            stores and processes, where not all of them do. Attributes of edges in a store go by edge id. Where there
            are both, `adj_t` is sampled and edge ids are places in it, as in PyG; attributes of edges go by
            `edge_index`, whose edges may stand in another order.
        num_neighbors: Fanout of each hop, -1 for all neighbors; or these for each relation (dict, `NumNeighbors`).
        input_nodes: Seeds: ids, int32 or int64 `[S]`, a mask bool `[N]`, or None for all nodes; with types, a type or
            (type, seeds).
        input_time: A time for each seed, integers `[S]`; by default the times that `time_attr` gives the seeds.
        input_start_time, input_end_time: A window for each seed instead, see `NodeLoader`.
        replace: Draw with replacement.
        subgraph_type: `directional`: the edges sampled; `bidirectional`: these in both directions; `induced`: all edges
            among the nodes sampled.
        disjoint: Each seed gets a tree of its own, numbered by `batch`. Always so with times.
        temporal_strategy: `uniform`, or `last` for the latest neighbors.
        time_attr: Name of times of nodes or of edges, integers: only neighbors up to the time of a seed are sampled.
        weight_attr: Name of edge weights that neighbors are drawn by (Efraimidis & Spirakis, IPL 97(5), 2006): real
            numbers of any dtype, which count as they are, in 8 bytes where float32 does not hold them. One of weight 0
            is never drawn: without `replace` a node gets fewer where fewer have a positive weight, and it gets none
            where all weights are 0. Where all neighbors are taken, for -1 and, without `replace`, a fanout that covers
            them, those are too.
        transform: Called with every batch.
        transform_sampler_output: Called with PyG's `SamplerOutput` of every batch before features are fetched.
        is_sorted: Neighbors are sorted by time already, which is checked.
        filter_per_worker: Whether `collate_fn`, called by hand, gives batches, as PyG's does on a CPU by default, or
            what `filter_fn` makes them of.
        neighbor_sampler: A sampler of PyG's interface to use instead; features are still fetched on the device.
        directed: Deprecated in PyG; False means `subgraph_type="induced"`.
        device: Where to sample and where batches are; None is the current GPU if there is one, else the CPU.
        placement: Where topology and attributes live: `cuda`, `unified` (host memory that the GPU reads in place),
            `pinned`, `cpu`, or `auto`: GPU memory for what fits there, first the topology, then attributes from the
            smallest on, so that a quarter of the free memory, and at least 8 GiB or half of it, is left to the model;
            host memory for the rest, `unified` or `pinned`, whichever a short measurement, kept on disk, found
            faster. Labels, masks and other short rows go to GPU memory in any case. The first epoch says what was
            chosen in one line of the logger `pyg_direct.notice`, at level INFO.
        topology_placement: Where the topology lives, if not where `placement` says; or `peer`, for neighbors shared out
            over the GPUs of a group's processes that NVLink joins, all of which iterate.
        topology_cache: With the topology on the host: GPU memory for its hottest rows, see `CSRTopo.place`.
        store_dtype: Keep float32 attributes of more than 16 bytes a row as `torch.float16`, `torch.bfloat16` or
            `torch.float8_e4m3fn`; batches have float32 in that precision. Labels and other short rows stay exact.
        feature_cache: With attributes on the host: GPU memory for the rows met most often, in bytes, as `"2G"`, or as
            a share of the rows such as `"20%"`. None takes what `placement="auto"` has left to give, else nothing.
        sampling: `uniform`, or `labor`, another sampler that moves fewer rows: nodes of a hop that list the same
            neighbors pick the same ones (LABOR-0 with sequential Poisson sampling; Balin & Catalyurek, NeurIPS 2023).
            A node has as many neighbors as with `uniform`, but a batch has fewer nodes. See "Estimates" below.
        layer_dependency: With `labor`: all hops of a batch share their draws too, for fewer nodes still.
        super_batch: With node attributes on the host of a GPU: batches whose rows are read together, each row once.
            Up to three times as many are in GPU memory; as many as fit a quarter of what is free there. With types
            or other options: batches sampled in one call, whose nodes and edges share memory: one that is kept, saved
            or sent keeps all of it, or brings it; `batch.clone()` has its own. The batches are those that come without;
            with `transform_sampler_output` the rows of each are read alone. None is one batch; for graphs with types,
            with `prefetch=1`, 1, 2, 4, 8 and then 16, as far as a group takes at most 256 MiB of GPU memory, on a CPU
            128 MiB, and a sixteenth of what is free.
        seed: Seed of shuffling and of all draws, which are then a function of (`seed`, epoch, number of the batch), and
            leave torch's generator alone. None: each epoch draws what it follows from as it begins, from torch's CPU
            generator, or from `generator` if that is given, as often as torch's `DataLoader` does, and each call one
            number: `torch.manual_seed` repeats them, and nothing is drawn before. Two loaders with one seed draw the
            same neighbors for a node in batches of one number: give each its own seed.
        time_comparison: `<=` allows neighbors of the time of the seed, as PyG does; `<` only earlier ones.
        time_window: Only neighbors after the time of the seed minus this; None for no limit.
        prefetch: Batches made ahead; on a GPU one more is being sampled, on a CPU each is made by a thread of its own,
            with a share of the cores. 0 makes a batch when it is asked for, and so does any number where rows require a
            gradient, which batches carry. When GPU memory runs out over it, it shrinks, with a warning.
        ranks: For several processes that train together, each with a loader of the same arguments: batches are made as
            for one process, of `batch_size` seeds each, and process r of w gets the batches r, r + w, ... of every
            epoch. `"auto"` asks `torch.distributed`, or torchrun's variables, when an epoch starts, and is one process
            where there are none; or (r, w). Without a `seed`, each epoch follows the generator of process 0,
            for which the processes of a group meet as it begins. A
            `DistributedSampler` may be given instead, which shares out seeds; batches then depend on w.
        uneven: With `ranks`, where w does not divide the number of batches: `pad`: the processes left without one in
            the last round sample the first seeds of the epoch anew, so that none waits for ever for the gradients of
            the others; `drop`: the last round is left out; `keep`: they stop, for evaluation or inside
            `torch.distributed.algorithms.join.Join`. With `keep` and DDP outside of `Join` gradients are mixed in
            silence: a process that stopped adds its next batch, of the next epoch, to the last one of the others.
        cache_policy: With processes of a `torch.distributed` group, one a GPU, which all iterate: they keep node
            attributes of more than 16 bytes a row together, once in host memory, those of the first process of a host;
            `device_replicate`: each GPU has hot rows of its own; `p2p_clique_replicate`: GPUs that NVLink joins read
            theirs from each other, so that `feature_cache`, which is for each GPU, caches as many times more. Neighbor
            lists of a `Data` that is sampled uniformly are once in host memory too. None: every process has its own.
            See `Feature`; what is written to the attributes later is told, not followed (see "Edits" below).
        cold_policy: With `cache_policy`, where GPUs read the other rows, and with `topology_placement="auto"` neighbor
            lists that do not fit their memory: `unified`, a copy for each; `pinned`, one for all; or `auto`, the first
            where the host has room; and for rows `shard`; see `Feature`. With `shard`, batches are made in step with
            the other processes, which all iterate; one that has fewer batches, or leaves an epoch early, takes part in
            those of the others meanwhile, and ends its process group after they are done (`dist.barrier()`).
        hotness: What ranks rows for `feature_cache`, of attributes that no other loader has placed yet. `expected`: the
            chance that a batch reads them, computed from the graph in one pass over the edges a hop, when a cache is
            filled (see `expected_reads`); where it is not known, with times, weights or a sampler of the program's,
            `degree`. `degree`: how many nodes list them. Batches are the same with either. With `expected`, a `Data`
            that is sampled uniformly has hot rows of edge attributes on the host too: `feature_cache` is then one
            budget, for the rows of nodes and edges that a batch reads with the highest chance a byte; to rank them
            takes 64 bytes an edge, and half of the free memory at most. Deprecated: `frequency`, for a `Data` that is
            sampled uniformly: that chance, corrected by reads that are counted while `presample` epochs are sampled
            before the first one; take `expected`.
        presample: Deprecated, with `frequency`: epochs, or a part of one. None is a twentieth with `replace` and
            with `labor`; otherwise nothing is counted.
        custom_cls: Class of the batches of a graph in stores.
        input_id: An id for each seed, `[S]` of any dtype, that batches hold instead of its position.
        **kwargs: Arguments of `torch.utils.data.DataLoader`. Workers are not needed and their options are absorbed,
            unless `multiprocessing_context` says how to start them: `"spawn"` gives processes that sample on the CPU.

    Edits. Of a `Data` or `HeteroData` an epoch samples edges, times and weights as they were when it began. Rows of
    attributes are those of the moment when a batch is handed out, as with PyG's loader without workers. Torch counts
    writes to a tensor: a batch that was made ahead of one is read again, with one warning, and from then on rows are
    read when a batch is asked for. Writes through NumPy or `.data` are not counted. They are found when an epoch
    begins, by comparing what was copied with the graph: all of a tensor up to 32 MiB, samples of a larger one, where
    a run of 1/2048 of its bytes is found for certain and a single number hardly ever. Assign such a tensor anew
    (`data.edge_index = data.edge_index.clone()`) to be sure. `loader(index)` compares samples from 64 KiB on. Within an
    epoch such a write is seen only where rows are no copies, and not by batches made ahead. If there are fewer nodes
    than the loader has seeds for, an `IdError` says so.
    Weights of negative links are compared so too.

    Not all edits take effect. A `GraphStore` is asked for its edges and times once, when the loader is made; what is
    written later to the tensors that it handed out is found when an epoch begins, as in a `Data`, but not what is put
    anew, nor anything in a store that hands out copies. A `FeatureStore` is asked for rows batch by batch. Writes to
    tables of ours, and to tensors that another store keeps in its attributes or in dicts there, are followed as those
    to a `Data` are; of a store that keeps its rows elsewhere batches made ahead have older ones, and nothing tells:
    `prefetch=0` asks when a batch is wanted. On a GPU tables of ours are copies: write by `Feature.update_`. Rows that
    processes share (`cache_policy`) are read-only: one warning tells writes to them, if this process makes them, and
    they are placed anew only where every process assigns the attribute anew between epochs; writes of other processes
    are not seen. `Producers` and graphs in parts (`DistNeighborLoader`) tell what is not in their batches.

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
        NotImplementedError: combinations that PyG refuses so.

    Example:
        >>> data = Data(x=torch.arange(4.0).view(4, 1), edge_index=torch.tensor([[1, 2, 3], [0, 0, 1]]))
        >>> (batch,) = NeighborLoader(data, num_neighbors=[-1, -1], input_nodes=torch.tensor([0]), device="cpu")
        >>> batch.n_id.tolist(), batch.edge_index.tolist(), batch.batch_size
        ([0, 1, 2, 3], [[1, 2, 3], [0, 0, 1]], 1)
        >>> batch.num_sampled_nodes, batch.num_sampled_edges
        ([1, 2, 1], [2, 1])
    """

    _sampler_name = "neighbor_sampler"

    def __init__(self, data: Any, num_neighbors: Any, input_nodes: Any = None, input_time: Any = None,
                 replace: bool = False, subgraph_type: Any = "directional", disjoint: bool = False,
                 temporal_strategy: str = "uniform", time_attr: str | None = None, weight_attr: str | None = None,
                 transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, is_sorted: bool = False,
                 filter_per_worker: bool | None = None, neighbor_sampler: Any = None, directed: bool = True, *,
                 device: Device = None, placement: str = "auto", topology_placement: str | None = None,
                 feature_cache: int | str | None = None, topology_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, sampling: str = "uniform", layer_dependency: bool = False,
                 super_batch: int | None = None, seed: int | None = None, prefetch: int = 1,
                 time_comparison: str = "<=", time_window: int | None = None,
                 ranks: tuple[int, int] | str | None = None, uneven: str = "pad", cache_policy: str | None = None,
                 cold_policy: str = "auto", hotness: str = "expected", presample: float | None = None,
                 custom_cls: Any = None, input_id: Tensor | None = None, input_start_time: Tensor | None = None,
                 input_end_time: Tensor | None = None, **kwargs: Any) -> None:  # fmt: skip
        input_time = join_windows("input_time", input_time, input_start_time, input_end_time, time_window)
        if input_time is not None and time_attr is None and neighbor_sampler is None:
            given = "input_time" if input_start_time is None else "input_start_time"
            raise ArgumentError(f"{given} needs time_attr, the name of the times it is compared with, got None")
        device = device_for(device, neighbor_sampler)
        self._settle(device, placement, topology_placement, feature_cache, super_batch, seed, prefetch, ranks, uneven)
        self.sharing = settle_sharing(cache_policy, cold_policy)
        check_ranking(hotness, presample)
        self.hotness, self.presample = hotness, presample
        if topology_cache not in (None, "auto"):
            parse_size(topology_cache, 0, "topology_cache")
        self.topology_cache = topology_cache
        check_is_used(neighbor_sampler, {"time_comparison": time_comparison, "time_window": time_window,
                                         "topology_placement": topology_placement, "topology_cache": topology_cache},
                      {"replace": replace, "subgraph_type": subgraph_type, "disjoint": disjoint,
                       "temporal_strategy": temporal_strategy, "time_attr": time_attr, "weight_attr": weight_attr,
                       "is_sorted": is_sorted, "directed": directed})  # fmt: skip
        check_stores(data, cache_policy=cache_policy)
        check_flag("is_sorted", is_sorted)
        kwargs["filter_per_worker"] = settle_filter(filter_per_worker, data)
        layer_dependency = check_flag("layer_dependency", layer_dependency)
        plain = is_plain(data, num_neighbors, neighbor_sampler, time_attr, weight_attr,
                         check_flag("disjoint", disjoint), subgraph_type, check_flag("directed", directed))  # fmt: skip
        if plain:
            check_custom_cls(data, custom_cls)
            check_choices(temporal_strategy, time_comparison, time_window)
            fanouts = list(num_neighbors.values) if isinstance(num_neighbors, NumNeighbors) else num_neighbors
            self._open_plain(data, fanouts, input_nodes, replace, transform, transform_sampler_output, input_id,
                             store_dtype, sampling, layer_dependency, kwargs)  # fmt: skip
            return
        for name, value, allowed in (
            ("sampling", sampling, ("uniform",)),
            ("layer_dependency", layer_dependency, (False,)),
            ("hotness", hotness, ("degree", "expected")),
            ("topology_cache", topology_cache, (None, "auto")),
        ):
            if value not in allowed:
                raise ArgumentError(f"{name}={value!r} needs a Data that is sampled uniformly, without other options")
        self._recipe: Recipe | None = None
        self._made_sampler = neighbor_sampler is None
        if neighbor_sampler is None:
            neighbor_sampler = NeighborSampler(
                data, num_neighbors, subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr,
                is_sorted, directed=directed, device=device, placement=self.topology_placement, seed=self.seed,
                time_comparison=time_comparison, time_window=time_window)  # fmt: skip
        self._open_general(data, neighbor_sampler, input_nodes, input_time, transform, transform_sampler_output,
                           custom_cls, input_id, store_dtype, kwargs)  # fmt: skip

    def _open_plain(self, data: Data, num_neighbors: Any, input_nodes: Any, replace: bool, transform: Any,
                    transform_sampler_output: Any, input_id: Any, store_dtype: torch.dtype | None, sampling: str,
                    layer_dependency: bool, kwargs: dict[str, Any]) -> None:  # fmt: skip
        """Check what uniform batches of a `Data` are made of."""
        check_graph(data)
        check_callables(transform=transform, transform_sampler_output=transform_sampler_output)
        self.replace = check_flag("replace", replace)
        check_sampling(sampling, self.replace, layer_dependency)
        self._recipe = Recipe((), self.replace, sampling=sampling, layer_dependency=layer_dependency)
        self._choose_fanouts(num_neighbors)
        check_store_dtype(store_dtype)
        self.store_dtype = store_dtype
        input_nodes = read_input_nodes(input_nodes)
        num_nodes = count_nodes(data)
        num_seeds = count_seeds(input_nodes, num_nodes)
        check_input_id(input_id, num_seeds)
        kwargs = settle_workers(type(self), kwargs, self.device, num_seeds=num_seeds)
        # Not PyG's own constructor, which makes its sampler; its class is what PyG's models ask loaders for.
        open_loader(self, data, NodeSampler(self), input_nodes, None, transform, transform_sampler_output,
                    input_id=input_id, **kwargs)  # fmt: skip
        self.input_data.node = check_ids("input_nodes", self.input_data.node, num_nodes).long().cpu()
        self._plan: Any = None
        self._plan_topology: Any = None
        self._plan_recipe: Recipe | None = None
        self._attributes: Attributes | None = None
        self._num_calls = 0

    def _choose_fanouts(self, num_neighbors: Any) -> None:
        """Take other fanouts, from the next epoch or call on."""
        self.num_neighbors = check_fanouts("num_neighbors", num_neighbors)
        check_hops(self.num_neighbors, MAX_HOPS, "num_neighbors")
        assert self._recipe is not None
        self._recipe = replace_fields(self._recipe, fanouts=tuple(self.num_neighbors))

    def _prepare(self) -> Any:
        """Place what is not placed yet; reads `data` anew."""
        if self._recipe is None:
            return super()._prepare()
        topology = read_topology(self.data, self.device)
        self._check_inputs(input_nodes=(self.input_data.node, topology.node_count))
        if self._plan_topology is not topology or self._plan_recipe is not self._recipe:
            placed = self._place_topology(topology)
            self._plan, self._plan_topology, self._placed = open_plan(placed, self._recipe), topology, placed
            self._plan_recipe = self._recipe
        self._placed.check_process()
        # Afterwards attributes are placed.
        is_first = self._attributes is None
        ranking = rank_rows(self, self._placed, self._plan, may_sample=is_first)
        edges = rank_edges(self, self._placed) if is_first else None
        self._place_attributes(ranking, edges)
        assert self._attributes is not None
        if self.device.type == "cuda":
            announce(describe([summarise(topology, self._placed), *self._attributes.summarise()]))
        return self._attributes

    def _place_attributes(self, ranking: Any, edges: Any = None) -> None:
        counts = {"node": self._plan_topology.node_count, "edge": self._plan_topology.edge_count}
        self._attributes = Attributes(self.data, ranking, self.device, self.placement, self.feature_cache,
                                      self.store_dtype, self.sharing, edges, counts=counts)  # fmt: skip

    def _rows(self) -> Any:
        return super()._rows() if self._recipe is None else self._attributes

    def _renew_rows(self) -> None:
        if self._recipe is None:
            super()._renew_rows()
        else:
            self._place_attributes(rank_rows(self, self._placed, self._plan, may_sample=False))

    def _place_topology(self, topology: CSRTopo) -> PlacedTopology:
        place = self.topology_placement
        if self.sharing:
            place = keep_once(topology, place, self.device, self.sharing["cold_policy"])
        try:
            return topology.place(place, self.device, topology_cache=self.topology_cache)
        except torch.OutOfMemoryError as error:
            if self.topology_placement != "auto":
                raise
            reason = str(error).split(".")[0]
        torch.cuda.empty_cache()
        host = choose_host_memory(self.device.index)
        warn(f"the topology goes to {host} memory, as GPU memory ran out: {reason}", PlacementWarning)
        return topology.place(host, self.device, topology_cache=self.topology_cache)

    def _sample_now(self, seeds: Tensor) -> Sample:
        if self._attributes is None or self._plan_recipe is not self._recipe:
            self._prepare()
        key = take_key()
        if key is None:
            key = call_key(self.seed, self._num_calls)
            self._num_calls += 1
        # Of the graph that the plan is of, which may have been edited since.
        seeds = check_ids("index", seeds, self._plan_topology.node_count).long()
        sample: Sample = self._plan.sample(seeds, key)
        return sample

    def __call__(self, index: Any) -> Any:
        """The batch around the input nodes at these positions; each call draws anew."""
        if self._recipe is None:
            return super().__call__(index)
        with glance_only():
            self._prepare()
        positions = read_positions(index, len(self.dataset))
        if not self._samples_itself:
            return self._finish_batch(self._finish_drawn(self._ask(positions, None)))
        return self._finish_batch(self._build_plain(self._sample_now(self.input_data.node[positions]), positions))

    def filter_fn(self, out: Any) -> Any:
        """The batch of a `SamplerOutput` of this loader's sampler (PyG's hook).

        Args:
            out: PyG's `SamplerOutput` or `HeteroSamplerOutput`, or a batch, which stays as it is.
        """
        if self._recipe is None:
            return super().filter_fn(out)
        if isinstance(out, Data):
            return out
        attributes = self._prepare() if self._attributes is None else self._current_rows()
        if self.transform_sampler_output is not None:
            out = self.transform_sampler_output(out)
        batch = self._build_output(attributes, out)
        return batch if self.transform is None else self.transform(batch)

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        if self._recipe is None:
            return super()._submit(key, number, seeds)
        if not self._samples_itself:
            # A program has put something of its own there since.
            with under_key(key.of_batch(number)):
                return Drawn(self._ask(seeds.positions, None))
        submit = self._plan.submit if isinstance(self._plan, GpuPlan) else self._plan.sample
        pending: Pending | Sample = submit(seeds.nodes, key.of_batch(number))
        return pending

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        if self._recipe is None:
            return super()._fetch(sample, number, seeds, shared)
        if isinstance(sample, Drawn):
            return self._finish_drawn(sample.out)
        memory: list[Any] = []
        batch = self._build_plain(sample, seeds.positions, shared, memory)
        if memory and self.device.type == "cuda":
            note_memory(batch, memory)
        return batch

    def _build_plain(self, sample: Sample, positions: Tensor, shared: Mapping[str, SharedRows] = ALONE,
                     memory: list[Any] | None = None) -> Any:  # fmt: skip
        assert self._attributes is not None
        input_id = positions if self.input_data.input_id is None else self.input_data.input_id[positions]
        if self._is_filtered:
            return self.filter_fn(to_output(sample, input_id))
        if self.transform_sampler_output is not None:
            return self._build_output(self._attributes, self.transform_sampler_output(to_output(sample, input_id)))
        batch = self._attributes.build(self.data, sample, input_id, shared=shared, memory=memory)
        store = batch._store._mapping
        store.pop("seed_time", None)
        register_hops(batch, store["num_sampled_nodes"], store["num_sampled_edges"], sample.max_degree)
        return batch

    def _finish_drawn(self, out: Any) -> Any:
        """The batch of what a program's sampler returned."""
        if self._is_filtered:
            return self.filter_fn(out)
        assert self._attributes is not None
        if self.transform_sampler_output is not None:
            out = self.transform_sampler_output(out)
        return self._build_output(self._attributes, out)

    def _build_output(self, attributes: Attributes, out: Any) -> Any:
        """The batch of a sample in PyG's form, as a user's transform or sampler may have left it."""
        out = self._finalise(check_output(out))
        batch = self._build_homogeneous(out, attributes, False)
        note_sample(batch, out)
        self._place_inputs(batch, out)
        return batch

    @property
    def _samples_itself(self) -> bool:
        """Whether batches are sampled by the loader's own plan, which no sampler of the program replaces."""
        return NodeSampler.serves(self.node_sampler)

    def _is_own(self) -> bool:
        if self._recipe is None:
            return super()._is_own()
        return EpochLoader._is_own(self) and self._samples_itself

    def _open_group(self, key: EpochKey) -> Any:
        if self._recipe is None:
            return super()._open_group(key)
        return EpochLoader._open_group(self, key) if self._is_own() else None

    def _shared(self) -> Mapping[str, Any]:
        return {} if self._attributes is None else self._attributes.on_host()

    def _work_with_workers(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]]) -> Iterator[Any]:
        assert self._recipe is not None
        worker = WorkerSampler(self._plan_topology.to_cpu(), self._recipe, key, self.input_data.node)
        pool: Any = torch.utils.data.DataLoader(
            Positions(len(self.dataset)), collate_fn=worker, num_workers=self.num_workers,
            batch_sampler=list(number_items(batches)), multiprocessing_context=self.multiprocessing_context,
            timeout=self.timeout, worker_init_fn=self.worker_init_fn, prefetch_factor=self.prefetch_factor,
            generator=torch.Generator().manual_seed(key.of_order() % 2**63))  # fmt: skip
        # On the generator's device, whichever torch's default one is.
        with torch.device("cpu"):
            samples = iter(pool)
        for item, sample in samples:
            on_device = Sample(sample.n_id.to(self.device), sample.edge_index.to(self.device),
                               sample.e_id.to(self.device), sample.node_counts, sample.edge_counts,
                               max_degree=sample.max_degree)  # fmt: skip
            self._current_rows()
            yield self._build_plain(on_device, torch.tensor(list(item), dtype=torch.int64, device="cpu"))

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        if self._recipe is None:
            return super()._list_places()
        attributes = self._attributes or self._prepare()
        topology = (f"topology: {self._plan_topology.node_count} nodes, {self._plan_topology.edge_count} edges, "
                    f"{self._placed.placement}")  # fmt: skip
        return [topology], attributes.describe()

    def _find_reads(self) -> ListReads | None:
        # Those of `labor` read whole lists.
        is_uniform = self._recipe is not None and self._recipe.sampling == "uniform"
        return self._placed.list_reads() if is_uniform else super()._find_reads()


class NodeSampler:
    """What PyG's `NodeLoader` asks of a sampler; edge ids are final, so there is no permutation."""

    edge_permutation = None

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @classmethod
    def serves(cls, sampler: Any) -> bool:
        """Whether a sampler is one of these, and no program has put anything in its place, or in that of its method."""
        return (type(sampler) is cls and "sample_from_nodes" not in sampler.__dict__
                and cls.sample_from_nodes is _SAMPLE_FROM_NODES)  # fmt: skip

    @property
    def num_neighbors(self) -> list[int]:
        """Fanout of each hop; can be set, with effect on the next epoch."""
        return self._loader.num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, num_neighbors: Any) -> None:
        self._loader._choose_fanouts(num_neighbors)

    def sample_from_nodes(self, index: NodeSamplerInput) -> SamplerOutput:
        """Sample around nodes, under the next key of the loader's direct calls."""
        seeds = index.node
        sample = self._loader._sample_now(seeds)
        input_id = torch.arange(seeds.numel(), device="cpu") if index.input_id is None else index.input_id
        return to_output(sample, input_id)


_SAMPLE_FROM_NODES = NodeSampler.sample_from_nodes
