"""`NeighborLoader`: PyG's loader with sampling and feature collection on the training device; `SubGraphLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, NumNeighbors, SamplerOutput
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError, PlacementWarning, warn
from pyg_direct.features.row_dtypes import check_store_dtype
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.placed_topology import ListReads, PlacedTopology
from pyg_direct.kernels.batch_counters import MAX_HOPS
from pyg_direct.loader.arguments import (
    SubGraphOptions,
    TorchOptions,
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
from pyg_direct.loader.memory_placement import Placed, keep_once
from pyg_direct.loader.node_loader import NodeLoader, check_input_id, count_seeds, join_windows, open_loader
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.loader.prefetch.drivers import note_memory
from pyg_direct.loader.prefetch.processes import Positions, WorkerSampler, number_items
from pyg_direct.loader.sampler_loader import read_positions
from pyg_direct.nn.sorted_edges import register_hops
from pyg_direct.ops.argument_checks import check_callables, check_fanouts, check_flag, check_ids, checks_keywords
from pyg_direct.ops.compute_content_hash import glance_only
from pyg_direct.ops.sampling.sample_uniform import check_sampling
from pyg_direct.runtime.cuda.memory import choose_host_memory
from pyg_direct.runtime.host.host_memory import check_size
from pyg_direct.sampler.graph_reader import (
    FanoutsOf,
    Graph,
    Ids,
    InputNodes,
    Subgraph,
    check_graph,
    count_nodes,
    read_topology,
    settle_filter,
)
from pyg_direct.sampler.keyed_sampler import (
    Drawn,
    Output,
    check_is_used,
    device_for,
    take_key,
    to_output,
    under_key,
)
from pyg_direct.sampler.neighbor_sampler import NeighborSampler, check_choices
from pyg_direct.sampling.captured_plan import Pending
from pyg_direct.sampling.random_key import EpochKey, call_key
from pyg_direct.sampling.sampling_options import Recipe, Sample, check_hops
from pyg_direct.sampling.uniform_plan import GpuPlan, open_plan
from pyg_direct.typing import Device


class NeighborLoader(NodeLoader, PygNeighborLoader):  # type: ignore[misc]
    """Mini-batches around seeds, after PyG's `NeighborLoader` (same arguments, same batches in form and order).

    A batch is a PyG `Data` or `HeteroData` on `device`. It has node and edge attributes gathered there, and `n_id`,
    `e_id`, `input_id`, `batch_size`, `num_sampled_nodes`, `num_sampled_edges`. Nodes are ordered by hop, seeds first.
    With a `seed`, the batch b of epoch e is a function of (`seed`, e, b) and the input nodes. Without a `seed`, a
    number drawn for the epoch replaces (`seed`, e). Batches are equal on every device and placement. On a GPU, a
    batch is sampled by one captured CUDA graph.

    Args:
        data: A `Data` or `HeteroData` with `edge_index` or `adj_t`, or (`FeatureStore`, `GraphStore`). Edits before an
            epoch take effect in it; rows written during an epoch, in its next batch. See "Edits" below, also for the
            exceptions with stores and processes. Attributes of edges in a store are indexed by edge id. If there are
            both, `adj_t` is sampled and edge ids are positions in it, as in PyG. Attributes of edges follow
            `edge_index`, whose edges may be in another order.
        num_neighbors: Fanout of each hop, -1 for all neighbors; or these for each relation (dict, `NumNeighbors`).
        input_nodes: Seeds: ids, int32 or int64 `[S]`, a mask bool `[N]`, or None for all nodes; with types, a type or
            (type, seeds).
        input_time: A time for each seed, integers `[S]`; by default the seeds' times in `time_attr`.
        input_start_time, input_end_time: A window for each seed instead, see `NodeLoader`.
        replace: Draw with replacement.
        subgraph_type: `directional`: the sampled edges; `bidirectional`: these in both directions; `induced`: all edges
            among the sampled nodes.
        disjoint: Each seed gets its own tree, numbered by `batch`. Always so with times.
        temporal_strategy: `uniform`, or `last` for the latest neighbors.
        time_attr: Name of times of nodes or of edges, integers: only neighbors up to the time of a seed are sampled.
        weight_attr: Name of edge weights that neighbors are drawn by (Efraimidis & Spirakis, IPL 97(5), 2006). Weights
            are real numbers of any dtype, used exactly, in 8 bytes if float32 cannot represent them. Edges of weight 0
            are never drawn. Without `replace`, a node with fewer positive weights gets fewer neighbors; with none, it
            gets none. If all neighbors are taken, edges of weight 0 are too: for -1, and, without `replace`, for a
            fanout of at least the degree.
        transform: Called with every batch.
        transform_sampler_output: Called with PyG's `SamplerOutput` of every batch before features are fetched.
        is_sorted: Neighbors are sorted by time already, which is checked.
        filter_per_worker: Return type of a direct call of `collate_fn`: True for batches, as PyG's on a CPU by default;
            False for the input of `filter_fn`.
        neighbor_sampler: A sampler with PyG's interface to use instead; features are still fetched on the device.
        directed: Deprecated in PyG; False means `subgraph_type="induced"`.
        device: Device that samples and holds the batches; None is the current GPU if there is one, otherwise the CPU.
        placement: Memory of topology and attributes: `cuda`, `unified` (host memory that the GPU reads in place),
            `pinned`, `cpu`, or `auto`. With `auto`, GPU memory holds the topology, then attributes by increasing size.
            It leaves a quarter of the free memory to the model, and at least 8 GiB or half of it. The rest goes to host
            memory: `unified` or `pinned`, whichever a short measurement, kept on disk, found faster. Labels, masks and
            other short rows always go to GPU memory. The first epoch reports the choice in one line of the logger
            `pyg_direct.notice`, at level INFO.
        topology_placement: Memory of the topology, if it differs from `placement`; or `peer`: neighbors are divided
            over the GPUs, joined by NVLink, of a group's processes, all of which iterate.
        topology_cache: With the topology on the host: GPU memory for its hottest rows, see `CSRTopo.place`.
        store_dtype: Keep float32 attributes of more than 16 bytes a row as `torch.float16`, `torch.bfloat16` or
            `torch.float8_e4m3fn`; batches have float32 in that precision. Labels and other short rows stay exact.
        feature_cache: With attributes on the host: GPU memory for the most frequent rows. A size in bytes, `"2G"`, or a
            share of the rows such as `"20%"`. None uses the rest of the budget of `placement="auto"`, otherwise 0.
        sampling: `uniform`, or `labor`, which moves fewer rows: nodes of a hop with common neighbors pick the same ones
            (LABOR-0 with sequential Poisson sampling; Balin & Catalyurek, NeurIPS 2023). A node has as many neighbors
            as with `uniform`, but a batch has fewer nodes. See "Estimates" below.
        layer_dependency: With `labor`: all hops of a batch share their draws too, for even fewer nodes.
        super_batch: With node attributes on the host of a GPU: batches whose rows are read together, each row once. GPU
            memory holds up to three times as many batches; the rows of a group take at most a quarter of its free
            memory. With types or other options: batches sampled in one call, whose nodes and edges share memory. A
            kept, saved or sent batch then includes this memory; `batch.clone()` has its own. Batches do not change;
            with `transform_sampler_output` their rows are read separately. None is one batch. For graphs with types and
            `prefetch=1`, None is 1, 2, 4, 8 and then 16. A group then takes at most 256 MiB of GPU memory, on a CPU 128
            MiB, and a sixteenth of the free memory.
        seed: Seed of shuffling and of all draws. They are then a function of (`seed`, epoch, number of the batch), and
            torch's generator is not used. With None, each epoch draws its seed at its start, from torch's CPU generator
            or from `generator`. It makes as many draws as torch's `DataLoader`; each direct call draws one number.
            Nothing is drawn before. So `torch.manual_seed` repeats the batches. Two loaders with one seed draw the same
            neighbors for a node in batches with equal numbers: use different seeds.
        time_comparison: `<=` allows neighbors at the seed's own time, as PyG does; `<` only earlier ones.
        time_window: Only neighbors after the time of the seed minus this; None for no limit.
        prefetch: Batches prepared ahead. On a GPU one more is being sampled; on a CPU each is made by its own thread,
            with a share of the cores. 0 makes a batch on request. So does any number if rows require a gradient, which
            batches carry. If GPU memory runs out because of it, it is reduced, with a warning.
        ranks: For several processes that train together, each with a loader of the same arguments. Batches are made as
            for one process, of `batch_size` seeds each, and process r of w gets the batches r, r + w, ... of every
            epoch. `"auto"` reads `torch.distributed`, or torchrun's variables, at the start of an epoch, and is one
            process without both; or (r, w). Without a `seed`, each epoch takes its seed from process 0's generator, in
            a collective call. Alternatively, a `DistributedSampler` divides the seeds; batches then depend on w.
        uneven: With `ranks`, if w does not divide the number of batches. `pad`: processes without a batch in the last
            round sample the first seeds of the epoch again, so that no process waits forever for gradients. `drop`: the
            last round is left out. `keep`: they stop, for evaluation or inside
            `torch.distributed.algorithms.join.Join`. With `keep` and DDP outside of `Join`, gradients are mixed
            silently: a stopped process adds its next epoch's first batch to the others' last one.
        cache_policy: For processes of a `torch.distributed` group, one per GPU, which all iterate. They share node
            attributes of more than 16 bytes a row, once in host memory, from the first process of a host.
            `device_replicate`: each GPU has its own hot rows. `p2p_clique_replicate`: GPUs joined by NVLink read each
            other's hot rows. `feature_cache` is a size per GPU, so n GPUs cache n times as many rows. Neighbor lists of
            a `Data` with uniform sampling are in host memory once too. None: every process has its own. See `Feature`;
            later writes to the attributes are reported, but not followed (see "Edits" below).
        cold_policy: With `cache_policy`: memory of the other rows and, with `topology_placement="auto"`, of neighbor
            lists that do not fit GPU memory. `unified` is a copy for each process, `pinned` one for all, and `auto` the
            first if the host has room. For rows also `shard`, see `Feature`: batches are then made in lockstep with the
            other processes, which all iterate. A process with fewer batches, or after an abandoned epoch, takes part in
            the others' batches meanwhile. It ends its process group after they are done (`dist.barrier()`).
        hotness: Ranking of rows for `feature_cache`, of attributes that no other loader has placed yet. `expected`: the
            probability that a batch reads them (see `expected_reads`). It is computed from the graph when a cache is
            filled, in one pass over the edges per hop. If it is not known, with times, weights or a user's sampler,
            `degree` is used. `degree`: the number of nodes with the row's node as a neighbor. Batches do not depend on
            it. With `expected`, a `Data` with uniform sampling has hot rows of edge attributes on the host too.
            `feature_cache` is then one budget, for rows of nodes and edges by their probability per byte. The ranking
            takes 64 bytes an edge, and half of the free memory at most. Deprecated: `frequency`, for a `Data` with
            uniform sampling: this probability, corrected by reads that are counted in `presample` epochs before the
            first one; use `expected`.
        presample: Deprecated, with `frequency`: epochs, or a part of one. None is a twentieth with `replace` and with
            `labor`; otherwise no reads are counted.
        custom_cls: Class of the batches of a graph in stores.
        input_id: An id for each seed, `[S]` of any dtype, that batches hold instead of its position.
        ahead: With rows in a file (`Feature.from_file` in a `FeatureStore`): batches that are planned together, or
            memory, such as `"2G"`. The loader samples them ahead and reads each page of the file once for all of them,
            in order. Two such windows of batches are in host memory, page-locked if a GPU reads them; in GPU memory, if
            that holds no fewer rows (`PYG_DIRECT_AHEAD_GPU`). Rows stay there if a planned batch reads them again,
            also in the next epoch. Memory ends a window: seven eighths are for
            rows and the rest for samples, which a GPU has in its own memory. None takes a quarter of the free host
            memory, unless the system has cached the file when an epoch begins. Processes of a host divide it. 0 reads
            the rows of each batch alone. Batches do not change. It has no effect on samplers of the program, and on
            orders of seeds that it gives.
        **kwargs: Arguments of `torch.utils.data.DataLoader`. Workers are not needed and their options are absorbed,
            except with `multiprocessing_context`: `"spawn"` starts processes that sample on the CPU.

    Edits. An epoch samples edges, times and weights of a `Data` or `HeteroData` as they were at its start. Rows of
    attributes are current when a batch is handed over, as with PyG's loader without workers. torch counts writes to a
    tensor: a batch that was prefetched before a write is read again, with one warning. From then on rows are read when
    a batch is requested. Writes through NumPy or `.data` are not counted. They are detected at the start of an epoch,
    by comparing copies with the graph: tensors up to 32 MiB whole, larger ones by samples. Samples always detect a run
    of 1/2048 of the bytes, and hardly ever a single number. To be sure, assign a new tensor (`data.edge_index =
    data.edge_index.clone()`). `loader(index)` compares samples from 64 KiB on. Within an epoch, a CPU
    compares 64 numbers of each contiguous attribute for every batch. If it detects such a write, it is followed as one
    that torch counts; a write to few rows may be missed. A GPU does not compare: batches have such a write only in rows
    that are not copied, and prefetched batches do not have it. If the graph has fewer nodes than the seeds need, an
    `IdError` is raised. Weights of negative links are compared in the same way.

    Some edits do not take effect. Edges and times of a `GraphStore` are read once, when the loader is made. Later
    writes to the tensors that it returned are detected at the start of an epoch, as in a `Data`. New tensors are not,
    nor writes to a store that returns copies. Rows of a `FeatureStore` are read batch by batch. Writes to tables of our
    store are followed as in a `Data`; so are writes to tensors that another store keeps in its attributes or in dicts
    there. For a store that keeps its rows elsewhere, prefetched batches have older rows without a warning; `prefetch=0`
    reads rows on request. On a GPU, tables of our store are copies: write them by `Feature.update_`. Rows that
    processes share (`cache_policy`) are read only: one warning reports this process's writes. They are placed again
    only if every process assigns the attribute between epochs; writes of other processes are not detected. `Producers`
    and graphs in parts (`DistNeighborLoader`) report writes that are not in their batches.

    Estimates. With `labor`, a node picks its k of d > k neighbors by the smallest of d independent uniform draws, one
    per neighbor. So any k of them are equally likely, and each is picked with probability k / d. Given the nodes that a
    hop expands, the mean over the picks has the same expectation and variance as with `uniform`. PyG's mean aggregation
    needs no weights, and a sum must be scaled by d / k, as with `uniform`. There are three differences to `uniform`.
    Means of different nodes are correlated, so that a loss over a batch may vary more or less. With `layer_dependency`,
    nodes of one hop are picked more often in the next; common neighborhoods bias the estimate through several layers.
    Parallel edges share the draw of their source and are picked together, so that the mean of such a node is biased.
    `labor` reads every list of neighbors whole, O(degree) per node; `uniform` takes O(fanout). With a topology on the
    host, lists are read over the link, and the saved rows must outweigh them.

    Raises:
        ArgumentError, ArgumentTypeError, IdError, DeviceError: named argument, rule and value.
        NotImplementedError: combinations that PyG does not support either.

    Example:
        >>> data = Data(x=torch.arange(4.0).view(4, 1), edge_index=torch.tensor([[1, 2, 3], [0, 0, 1]]))
        >>> (batch,) = NeighborLoader(data, num_neighbors=[-1, -1], input_nodes=torch.tensor([0]), device="cpu")
        >>> batch.n_id.tolist(), batch.edge_index.tolist(), batch.batch_size
        ([0, 1, 2, 3], [[1, 2, 3], [0, 0, 1]], 1)
        >>> batch.num_sampled_nodes, batch.num_sampled_edges
        ([1, 2, 1], [2, 1])
    """

    _sampler_name = "neighbor_sampler"

    @checks_keywords
    def __init__(self, data: Graph, num_neighbors: FanoutsOf, input_nodes: InputNodes = None,
                 input_time: Tensor | None = None, replace: bool = False, subgraph_type: Subgraph = "directional",
                 disjoint: bool = False, temporal_strategy: str = "uniform", time_attr: str | None = None,
                 weight_attr: str | None = None, transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, is_sorted: bool = False,
                 filter_per_worker: bool | None = None, neighbor_sampler: BaseSampler | None = None,
                 directed: bool = True, *, device: Device = None, placement: str = "auto",
                 topology_placement: str | None = None, feature_cache: int | str | None = None,
                 topology_cache: int | str | None = None, store_dtype: torch.dtype | None = None,
                 sampling: str = "uniform", layer_dependency: bool = False, super_batch: int | None = None,
                 seed: int | None = None, prefetch: int = 1, time_comparison: str = "<=",
                 time_window: int | None = None, ranks: tuple[int, int] | str | None = None, uneven: str = "pad",
                 cache_policy: str | None = None, cold_policy: str = "auto", hotness: str = "expected",
                 presample: float | None = None, custom_cls: Any = None, input_id: Tensor | None = None,
                 input_start_time: Tensor | None = None, input_end_time: Tensor | None = None,
                 ahead: int | str | None = None, **kwargs: Unpack[TorchOptions]) -> None:  # fmt: skip
        input_time = join_windows("input_time", input_time, input_start_time, input_end_time, time_window)
        if input_time is not None and time_attr is None and neighbor_sampler is None:
            given = "input_time" if input_start_time is None else "input_start_time"
            raise ArgumentError(f"{given} needs time_attr, the name of the times it is compared with, got None")
        device = device_for(device, neighbor_sampler)
        self._settle(
            device, placement, topology_placement, feature_cache, super_batch, seed, prefetch, ranks, uneven, ahead
        )
        self.sharing = settle_sharing(cache_policy, cold_policy)
        check_ranking(hotness, presample)
        self.hotness, self.presample = hotness, presample
        if topology_cache not in (None, "auto"):
            check_size(topology_cache, "topology_cache")
        self.topology_cache = topology_cache
        check_is_used(neighbor_sampler, {"time_comparison": time_comparison, "time_window": time_window,
                                         "topology_placement": topology_placement, "topology_cache": topology_cache},
                      {"replace": replace, "subgraph_type": subgraph_type, "disjoint": disjoint,
                       "temporal_strategy": temporal_strategy, "time_attr": time_attr, "weight_attr": weight_attr,
                       "is_sorted": is_sorted, "directed": directed})  # fmt: skip
        check_stores(data, cache_policy=cache_policy)
        check_flag("is_sorted", is_sorted)
        options = {**kwargs, "filter_per_worker": settle_filter(filter_per_worker, data)}
        layer_dependency = check_flag("layer_dependency", layer_dependency)
        plain = is_plain(data, num_neighbors, neighbor_sampler, time_attr, weight_attr,
                         check_flag("disjoint", disjoint), subgraph_type, check_flag("directed", directed))  # fmt: skip
        if plain:
            check_custom_cls(data, custom_cls)
            check_choices(temporal_strategy, time_comparison, time_window)
            fanouts = list(num_neighbors.values) if isinstance(num_neighbors, NumNeighbors) else num_neighbors
            self._open_plain(data, fanouts, input_nodes, replace, transform, transform_sampler_output, input_id,
                             store_dtype, sampling, layer_dependency, options)  # fmt: skip
            return
        check_sampling(sampling, replace=False, layer_dependency=False)
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
                           custom_cls, input_id, store_dtype, options)  # fmt: skip

    def _open_plain(self, data: Data, num_neighbors: Any, input_nodes: Any, replace: bool, transform: Any,
                    transform_sampler_output: Any, input_id: Any, store_dtype: torch.dtype | None, sampling: str,
                    layer_dependency: bool, kwargs: Mapping[str, Any]) -> None:  # fmt: skip
        """Check the inputs of uniform batches of a `Data`."""
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
        # Without PyG's own constructor, which makes its sampler; its class is needed, as PyG's models check it.
        open_loader(self, data, NodeSampler(self), input_nodes, None, transform, transform_sampler_output,
                    input_id=input_id, **kwargs)  # fmt: skip
        self.input_data.node = check_ids("input_nodes", self.input_data.node, num_nodes).long().cpu()
        self._plan: Any = None
        self._plan_topology: Any = None
        self._plan_recipe: Recipe | None = None
        self._num_calls = 0

    def _choose_fanouts(self, num_neighbors: Any) -> None:
        """Set other fanouts, from the next epoch or call on."""
        self.num_neighbors = check_fanouts("num_neighbors", num_neighbors)
        check_hops(self.num_neighbors, MAX_HOPS, "num_neighbors")
        assert self._recipe is not None
        self._recipe = replace_fields(self._recipe, fanouts=tuple(self.num_neighbors))

    def _prepare(self) -> Any:
        """Read `data` again, and place all parts that are not placed yet."""
        if self._recipe is None:
            return super()._prepare()
        topology = read_topology(self.data, self.device)
        self._check_inputs(input_nodes=(self.input_data.node, topology.node_count))
        if self._plan_topology is not topology or self._plan_recipe is not self._recipe:
            placed = self._place_topology(topology)
            self._plan, self._plan_topology, self._placed = open_plan(placed, self._recipe), topology, placed
            self._plan_recipe = self._recipe
        self._placed.check_process()
        # Attributes are placed afterwards.
        is_first = self._general is None
        ranking = rank_rows(self, self._placed, self._plan, may_sample=is_first)
        edges = rank_edges(self, self._placed) if is_first else None
        self._place_attributes(ranking, edges)
        return self._general

    def _summarise_places(self) -> Iterable[Placed] | None:
        if self._recipe is None:
            return super()._summarise_places()
        rows = super()._summarise_places()
        return None if rows is None else [summarise(self._plan_topology, self._placed), *rows]

    def _place_attributes(self, ranking: Any, edges: Any = None) -> None:
        counts = {"node": self._plan_topology.node_count, "edge": self._plan_topology.edge_count}
        self._general = Attributes(self.data, ranking, self.device, self.placement, self.feature_cache,
                                   self.store_dtype, self.sharing, edges, counts=counts)  # fmt: skip

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
        if self._general is None or self._plan_recipe is not self._recipe:
            self._prepare()
        key = take_key()
        if key is None:
            key = call_key(self.seed, self._num_calls)
            self._num_calls += 1
        # Of the plan's graph, which may have been edited since.
        seeds = check_ids("index", seeds, self._plan_topology.node_count).long()
        sample: Sample = self._plan.sample(seeds, key)
        return sample

    def __call__(self, index: Ids) -> Data | HeteroData:
        """Make the batch around the input nodes at these positions; each call makes new draws."""
        if not self._samples_itself:
            return super().__call__(index)
        with glance_only():
            self._prepare()
        positions = read_positions(index, len(self.dataset))
        return self._finish_batch(self._build_plain(self._sample_now(self.input_data.node[positions]), positions))

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        if self._recipe is None:
            return super()._submit(key, number, seeds)
        if not self._samples_itself:
            # The program has assigned its own sampler since.
            with under_key(key.of_batch(number)):
                return Drawn(self._ask(seeds.positions, None))
        submit = self._plan.submit if isinstance(self._plan, GpuPlan) else self._plan.sample
        pending: Pending | Sample = submit(seeds.nodes, key.of_batch(number))
        return pending

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        if isinstance(sample, Drawn):
            return super()._fetch(sample, number, seeds, shared)
        memory: list[Any] = []
        batch = self._build_plain(sample, seeds.positions, shared, memory)
        if memory and self.device.type == "cuda":
            note_memory(batch, memory)
        return batch

    def _build_plain(self, sample: Sample, positions: Tensor, shared: Mapping[str, SharedRows] = ALONE,
                     memory: list[Any] | None = None) -> Any:  # fmt: skip
        input_id = positions if self.input_data.input_id is None else self.input_data.input_id[positions]
        if self._is_filtered:
            return self.filter_fn(to_output(sample, input_id))
        if self.transform_sampler_output is not None:
            return self._build(to_output(sample, input_id))
        batch = self._general.build(self.data, sample, input_id, shared=shared, memory=memory)
        store = batch._store._mapping
        store.pop("seed_time", None)
        register_hops(batch, store["num_sampled_nodes"], store["num_sampled_edges"], sample.max_degree)
        return batch

    @property
    def _samples_itself(self) -> bool:
        """True if batches are sampled by the loader's own plan, without another sampler."""
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
        return {} if self._general is None else self._general.on_host()

    def _work_with_workers(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]]) -> Iterator[Any]:
        assert self._recipe is not None
        worker = WorkerSampler(self._plan_topology.to_cpu(), self._recipe, key, self.input_data.node)
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
            yield self._build_plain(on_device, torch.tensor(list(item), dtype=torch.int64, device="cpu"))

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        if self._recipe is None:
            return super()._list_places()
        lines, rows = super()._list_places()
        topology = (f"topology: {self._plan_topology.node_count} nodes, {self._plan_topology.edge_count} edges, "
                    f"{self._placed.placement}")  # fmt: skip
        return [topology, *lines], rows

    def _find_reads(self) -> ListReads | None:
        # `labor` reads whole lists.
        is_uniform = self._recipe is not None and self._recipe.sampling == "uniform"
        return self._placed.list_reads() if is_uniform else super()._find_reads()


class NodeSampler:
    """Sampler in the interface of PyG's `NodeLoader`; edge ids are final, so there is no permutation."""

    edge_permutation = None

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @classmethod
    def serves(cls, sampler: Any) -> bool:
        """Check if a sampler is of this class, and the program has replaced neither it nor its method."""
        return (type(sampler) is cls and "sample_from_nodes" not in sampler.__dict__
                and cls.sample_from_nodes is _SAMPLE_FROM_NODES)  # fmt: skip

    @property
    def num_neighbors(self) -> list[int]:
        """Fanout of each hop; can be set, for the next epoch."""
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


class SubGraphLoader(NeighborLoader):
    """Batches of induced subgraphs around seeds, with `mapping`: positions of the seeds among the nodes, int64 `[B]`.

    A batch equals one of `NeighborLoader(subgraph_type="induced")`.

    Args:
        data: See `NeighborLoader`.
        input_nodes: Seeds: ids, a mask, or None for all nodes; with types, a type or (type, seeds).
        num_neighbors: Fanout of each hop; None for the seeds only.
        neighbor_sampler: A sampler with PyG's interface to use instead.
        **kwargs: Further arguments of `NeighborLoader`.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> data = Data(x=torch.eye(3), edge_index=torch.tensor([[1, 2, 1], [0, 0, 2]]))
        >>> (batch,) = SubGraphLoader(data, torch.tensor([0]), [-1], device="cpu")
        >>> batch.n_id.tolist(), batch.edge_index.tolist()  # with the edge between two neighbors
        ([0, 1, 2], [[1, 2, 1], [0, 0, 2]])
    """

    def __init__(self, data: Graph, input_nodes: InputNodes = None, num_neighbors: FanoutsOf | None = None,
                 neighbor_sampler: BaseSampler | None = None,
                 **kwargs: Unpack[SubGraphOptions]) -> None:  # fmt: skip
        given: Mapping[str, Any] = kwargs
        if "subgraph_type" in given:
            raise ArgumentError(f"subgraph_type must be 'induced', which it is, got {given['subgraph_type']!r}")
        super().__init__(data, [] if num_neighbors is None else num_neighbors, input_nodes,
                         neighbor_sampler=neighbor_sampler,
                         subgraph_type="induced" if neighbor_sampler is None else "directional", **kwargs)  # fmt: skip

    def _place_inputs(self, batch: Any, out: Output) -> None:
        super()._place_inputs(batch, out)
        part = batch if self.input_data.input_type is None else batch[self.input_data.input_type]
        # Seeds come first, in the order given.
        part.mapping = torch.arange(part.batch_size, device=self.device)
