"""`NeighborLoader`: PyG's loader with sampling and feature collection on the training device; `SubGraphLoader`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.sampler import BaseSampler
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentError
from pyg_direct.loader.arguments import (
    SubGraphOptions,
    TorchOptions,
    check_stores,
    settle_sharing,
)
from pyg_direct.loader.hot_row_ranking import check_ranking
from pyg_direct.loader.memory_placement import keep_once
from pyg_direct.loader.node_loader import NodeLoader, join_windows
from pyg_direct.loader.sampler_loader import is_uniform
from pyg_direct.ops.argument_checks import check_flag, checks_keywords
from pyg_direct.sampler.graph_reader import (
    FanoutsOf,
    Graph,
    InputNodes,
    Subgraph,
    settle_filter,
)
from pyg_direct.sampler.keyed_sampler import (
    Output,
    check_is_used,
    device_for,
)
from pyg_direct.sampler.neighbor_sampler import NeighborSampler
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
            as with `uniform`, but a batch has fewer nodes. With types, times and trees too: a node has one draw a hop
            for all relations and trees that list it. Without `replace`, `weight_attr` and lists in files. See
            "Estimates" below.
        layer_dependency: With `labor`: all hops of a batch share their draws too, for even fewer nodes.
        super_batch: With node attributes on the host of a GPU: batches whose rows are read together, each row once. GPU
            memory holds up to three times as many batches; the rows of a group take at most a quarter of its free
            memory. With types or other options: batches sampled in one call, whose nodes and edges share memory. A
            kept, saved or sent batch then includes this memory; `batch.clone()` has its own. Batches do not change;
            with `transform_sampler_output` their rows are read separately. None is one batch. For graphs with types and
            `prefetch=1`, None is 1, 2, 4, 8 and then 16, on a GPU only if each seed has a tree (`disjoint`, times). A
            group then takes at most 256 MiB of GPU memory, on a CPU 128 MiB, and a sixteenth of the free memory.
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
        check_is_used(neighbor_sampler, {"time_comparison": time_comparison, "time_window": time_window,
                                         "topology_placement": topology_placement, "topology_cache": topology_cache,
                                         "sampling": sampling, "layer_dependency": layer_dependency},
                      {"replace": replace, "subgraph_type": subgraph_type, "disjoint": disjoint,
                       "temporal_strategy": temporal_strategy, "time_attr": time_attr, "weight_attr": weight_attr,
                       "is_sorted": is_sorted, "directed": directed})  # fmt: skip
        check_stores(data, cache_policy=cache_policy)
        check_flag("is_sorted", is_sorted)
        options = {**kwargs, "filter_per_worker": settle_filter(filter_per_worker, data)}
        self._made_sampler = neighbor_sampler is None
        if neighbor_sampler is None:
            neighbor_sampler = NeighborSampler(
                data, num_neighbors, subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr,
                is_sorted, directed=directed, device=device, placement=self.topology_placement, seed=self.seed,
                time_comparison=time_comparison, time_window=time_window, topology_cache=topology_cache,
                sampling=sampling, layer_dependency=layer_dependency)  # fmt: skip
        if hotness == "frequency" and not is_uniform(neighbor_sampler):
            raise ArgumentError(f"hotness={hotness!r} needs a Data that is sampled uniformly, without other options")
        self._open_general(data, neighbor_sampler, input_nodes, input_time, transform, transform_sampler_output,
                           custom_cls, input_id, store_dtype, options)  # fmt: skip

    def _open_plan(self) -> Any:
        if self.sharing and self._made_sampler and is_uniform(self._sampler):
            place = keep_once(self._sampled_topology, self.topology_placement, self.device, self.sharing["cold_policy"])
            # With `auto`, neighbor lists go to the host if GPU memory runs out.
            is_chosen = place == "cuda" and self.topology_placement == "auto"
            self._sampler.placement = "auto" if is_chosen else place
        return super()._open_plan()


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

    def _open_plan(self) -> Any:
        # Batches have `mapping`, which `_place_inputs` writes.
        return None

    def _place_inputs(self, batch: Any, out: Output) -> None:
        super()._place_inputs(batch, out)
        part = batch if self.input_data.input_type is None else batch[self.input_data.input_type]
        # Seeds come first, in the order given.
        part.mapping = torch.arange(part.batch_size, device=self.device)
