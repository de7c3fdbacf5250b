"""`DistNeighborLoader`, `DistLinkNeighborLoader`, `DistSubGraphLoader`: PyG's batches of a graph in parts.

`check_alike` checks that all ranks were created with equal arguments. Otherwise their batches would not match a
single-process run.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType
from typing_extensions import Unpack

from pyg_direct.distributed.collate import DistAttributes
from pyg_direct.distributed.dist_graph import DistGraph
from pyg_direct.distributed.dist_neighbor_sampler import DistNeighborSampler
from pyg_direct.distributed.exchange_plan import ExchangePlan, PlainSample
from pyg_direct.distributed.graph_part import PartTopo
from pyg_direct.distributed.part_plan import PartPlan
from pyg_direct.distributed.row_exchange import RowExchange
from pyg_direct.distributed.row_foresight import MOST_AHEAD, PlannedRows, RowsAhead, StepsAhead
from pyg_direct.errors import ArgumentError, ArgumentTypeError, warn_unused
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.loader.arguments import DistSubGraphOptions, TorchOptions
from pyg_direct.loader.base_loader import ALONE, make_alone, run_stages
from pyg_direct.loader.batch_report import EpochRecord, Stages
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.link_loader import LinkLoader, check_strict, tell_several
from pyg_direct.loader.node_loader import NodeLoader, join_windows
from pyg_direct.loader.prefetch.batch_groups import SharedRows, Together
from pyg_direct.loader.prefetch.drivers import hold_for
from pyg_direct.loader.prefetch.lockstep_ranks import GROUP_BYTES, GroupSize, Overlap, Steps
from pyg_direct.loader.sampler_loader import GeneralLoader
from pyg_direct.ops.sampling.draw_random import derive_key
from pyg_direct.runtime.comm.host_group import count_processes, gather, has_group
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.cuda.launch import current_stream, side_streams
from pyg_direct.runtime.host.tensor_views import as_bytes
from pyg_direct.sampler.graph_reader import FanoutsOf, InputLinks, InputNodes, Negatives, Subgraph
from pyg_direct.sampler.keyed_sampler import Drawn
from pyg_direct.sampler.link_seeds import draws_itself
from pyg_direct.sampler.neighbor_sampler import NeighborSampler, has_windows
from pyg_direct.sampling.captured_plan import PendingOutput
from pyg_direct.sampling.random_key import EpochKey, check_seed
from pyg_direct.sampling.sampling_options import Sample

_NO_SEEDS = Seeds(*torch.empty(2, 0, dtype=torch.int64, device="cpu").unbind())


def check_alike(loader: Any, ranks: str) -> None:
    """Refuse a loader whose arguments differ between processes; collective, unless each process samples its own seeds
    alone.

    Args:
        loader: The loader, with sampler, inputs and batch numbers; a graph in one memory is sampled by each process
            alone.
        ranks: See `DistNeighborLoader`.
    """
    graph, sampler, given = loader.graph, loader._sampler, loader.input_data
    if graph.whole is None:
        negatives = getattr(loader, "neg_sampling", None)
        recipe = sampler._read_recipe()
        fanouts = recipe.table(PartTopo(graph.part.manifest, False, False)).tolist()
        how = (fanouts, replace(recipe, fanouts=()), sampler.time_attr is None, sampler.weight_attr is None,
               negatives and (negatives.mode, draws_itself(negatives)), sampler.strict_negatives,
               getattr(sampler, "exclude_target_edges", False), getattr(sampler, "rev_edge_type", None), loader.ahead,
               has_windows(given.time))  # fmt: skip
        _compare(graph, "num_neighbors and other options of sampling must be equal in all processes", how)
    if ranks == "auto":
        seeds = [getattr(given, name, None) for name in ("node", "row", "col", "time")]
        what = (given.input_type, [_sum_up(ids) for ids in seeds], loader.seed, loader.batch_size, loader.drop_last,
                isinstance(loader.sampler, SequentialSampler))  # fmt: skip
        _compare(graph, "seeds, and seed, batch_size, shuffle and drop_last, must be equal in all processes, which "
                 "share the batches, unless ranks='own'", what)  # fmt: skip


def _sum_up(ids: Tensor | None) -> int | None:
    return None if ids is None else zlib.crc32(as_bytes(ids.cpu().contiguous()).numpy().data)


def _compare(graph: DistGraph, rule: str, value: Any) -> None:
    # Non-negative in int64.
    number = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1
    numbers = graph.communicator.run(graph.communicator.agree, number)
    other = next((rank for rank, found in enumerate(numbers) if found != numbers[0]), None)
    if other is not None:
        raise ArgumentError(f"{rule}, got others on rank {other} than on rank 0")


class _DistLoader(GeneralLoader):
    """Base of loaders of a graph in parts: batches are made in step with the other processes."""

    graph: DistGraph
    _evens_out_alone = True
    _keeps_rows = True
    _kept_words = (
        "rows of the graph in parts (own_rows) were written: batches have the rows that it was partitioned with, or "
        "not all of those that were written; keep rows that change in a DistFeature, written by put and indexed by "
        "batch.n_id"
    )
    # The sample of the batch being built, if its edges go in both directions, and rows of it that are there already.
    _sampled: Any = None
    _rows_read: Any = None
    _group = GroupSize()
    # Whether batches of this epoch are made in groups.
    _is_grouped = False
    # Of all epochs with foresight.
    _rows_ahead = RowsAhead()
    _given_data: Any
    ahead: int

    def _even_out(self, ranks: str) -> None:
        """Agree on equally many batches if each process has its own seeds; `ranks="auto"` needs no agreement."""
        self._given_data = self.data
        uneven = self._ranks.uneven
        if ranks != "own" or uneven == "keep":
            return
        try:
            own = len(self)
        except TypeError as error:
            raise ArgumentError("sampler and batch_sampler must have a length with ranks='own', got one without: give "
                                f"it __len__, or pass uneven='keep' instead of {uneven!r}") from error  # fmt: skip
        counts = self._count_batches(own, uneven)
        if uneven == "pad" and 0 in counts and max(counts) > 0:
            raise ArgumentError("input_nodes, or links, must give each process a batch with ranks='own' and "
                                f"uneven='pad', got none on rank {counts.index(0)}: give it some, or pass "
                                "uneven='drop' or uneven='keep'")  # fmt: skip
        self._ranks.num_steps = max(counts) if uneven == "pad" else min(counts)

    def _agree_on(self, drawn: int) -> int:
        graph = self.graph
        if self._ranks.ranks is None:
            # Own seeds and own draws, even if all generators have equal seeds.
            return int(derive_key(drawn, graph.rank, 0))
        agreed: list[int] = graph.communicator.run(graph.communicator.agree, drawn)
        return agreed[0]

    def _count_batches(self, own: int, uneven: str) -> list[int]:
        """Count the batches of each process for which another process may wait."""
        communicator = self.graph.communicator
        counts: list[int] = communicator.run(communicator.agree, own)
        num_clients = communicator.size
        if len(counts) == num_clients:
            return counts
        # Clients of servers can agree only over the process group in which they train.
        if count_processes() == num_clients:
            return gather(own, self.device if self.device.type == "cuda" else None)
        if uneven == "drop" or has_group():
            raise ArgumentError(f"uneven must be 'keep' with ranks='own' for clients of servers, unless a process "
                                f"group has just these {num_clients} clients, got {uneven!r}")  # fmt: skip
        # Without a process group no other client waits for this one.
        return counts

    def _prepare(self) -> Any:
        if self.data is not self._given_data:
            raise ArgumentError(f"data of a {type(self).__name__} cannot be replaced, got {type(self.data).__name__}: "
                                "partition the other graph, and make a loader of its DistGraph")  # fmt: skip
        self._check_seeds(self._sampler.num_nodes)
        # A graph in parts does not change, but weights of negatives may.
        if isinstance(self._sampler, NeighborSampler):
            self._sampler.forget_written()
        if self._general is None:
            self._general = DistAttributes(self.graph, not self._sampler.disjoint)
            # Before the first sample, on all processes.
            self._sampler._fetches_rows = self._is_own() and not self.ahead
        self._plan = self._open_plan()
        return self._general

    def _work_here(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None = None
                   ) -> Iterator[Any]:  # fmt: skip
        if self.graph.whole is not None:
            return super()._work_here(key, batches, record)
        return self._work_in_turn(key, batches, record)

    def _work_in_turn(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None
                      ) -> Iterator[Any]:  # fmt: skip
        communicator = self.graph.communicator
        # Ranks may differ in it, as in functions of the program.
        self._is_grouped = all(communicator.run(communicator.agree, int(self._groups())))
        if self._is_grouped:
            self._fetch_seed_times()
        foresees = self._foresees()
        overlaps, most = self._overlaps() and not foresees, self.graph.most_batches if self._is_grouped else 1
        if most != self._group.most:
            room = self.graph.step_bytes if self.device.type == "cuda" else 0
            self._group = GroupSize(most, room or GROUP_BYTES)
        ahead = self._open_ahead(key, record, most) if foresees else None
        together = None if most == 1 or overlaps or foresees else Together(most, *self._stages_together(key))
        stages = self._stages(key, record, together)
        make: Callable[..., list[Any]] | Overlap
        take_part: Callable[[int], Any] = self._take_part
        if ahead is not None:
            batches, make, take_part = ahead.follow(batches), ahead.make, ahead.take_part
        elif most == 1:
            make = partial(make_alone, stages)
        elif together is not None:
            make = partial(make_group, stages)
        else:
            make = Overlap(partial(self._begin, stages), partial(self._finish_begun, stages),
                           partial(self._build_begun, stages), self._find_ready_stream)  # fmt: skip
        steps = Steps(self.graph.communicator, batches, make, take_part, self.prefetch, self._group)
        try:
            yield from steps
        finally:
            steps.close()

    def _groups(self) -> bool:
        """Check if batches ahead are made in groups: with one exchange for all on a CPU, after one meeting on a GPU."""
        if (self.prefetch == 0 and not self.ahead) or not self._is_own():
            return False
        sampler, is_captured = self._sampler, self.graph.communicator.captured
        if self.device.type != "cpu" and not is_captured:
            return False
        negatives = getattr(self, "neg_sampling", None)
        is_drawn_here = sampler.strict_negatives and negatives is not None and draws_itself(negatives)
        if is_drawn_here or (sampler.strict_negatives and not is_captured):
            # Each batch has exchanges of the host before its hops.
            return False
        return is_captured or sampler.subgraph_type != SubgraphType.induced

    def _fetch_seed_times(self) -> None:
        """Fetch times of seeds that the program does not give, once; links have times of their own."""

    def _overlaps(self) -> bool:
        """Check if the batches of a group are sampled one after the other, with one more ahead of the host."""
        return self.device.type == "cuda"

    def _samples_together(self) -> bool:
        return self.graph.whole is None and self._is_grouped

    def _foresees(self) -> bool:
        """Check if batches of this epoch are planned (`ahead`); all ranks agree."""
        if not self.ahead:
            return False
        communicator = self.graph.communicator
        if all(communicator.run(communicator.agree, int(self._is_own()))):
            return True
        warn_unused({"ahead": self.ahead}, "a function of the program takes part in making batches: "
                    "transform_sampler_output or filter_fn")  # fmt: skip
        return False

    def _open_ahead(self, key: EpochKey, record: EpochRecord | None, most: int) -> StepsAhead:
        """Open the foresight of an epoch, with steps of at most so many batches."""
        rows, sizes = self.graph.rows, {entry.name: entry.num_nodes for entry in self.graph.part.manifest.nodes}
        assert isinstance(rows, RowExchange)
        memory = int(_KEPT_SHARE * free_bytes(self.device.index)) if self.device.type == "cuda" else \
            self._ahead_bytes()  # fmt: skip
        planned = PlannedRows(rows, sizes, memory, self.device)
        before = self._rows_ahead

        def read(samples: Sequence[Drawn]) -> list[Any]:
            found = self._general.read_planned([sample.out for sample in samples], planned)
            self._rows_ahead = before.plus(planned.counts)
            return found

        submit, _, fetch = self._stages_together(key)
        # A GPU samples a batch by exchanges of its own.
        size = 1 if self.device.type == "cuda" else most
        stages = self._stages(key, record, Together(size, submit, read, fetch))

        def plan(sample: Drawn) -> None:
            planned.plan(self._general.list_nodes(sample.out))

        return StepsAhead(self.graph.communicator, self.ahead, size, stages, plan, planned.drop, self._sample_none,
                          partial(read, ()))  # fmt: skip

    def _begin(self, stages: Stages, work: tuple[int, Seeds] | None) -> Any:
        """Begin to sample a batch; without work, one without seeds, for the other processes."""
        if work is not None:
            return stages.submit(*work)
        exchange = self._find_plain()
        if exchange is None:
            return self._submit_together([_NO_SEEDS], [0])
        return self._submit_plain(exchange, _NO_SEEDS.nodes, 0)

    def _sample_none(self) -> Any:
        """Sample a batch without seeds, for the other processes."""
        return self._submit_together([_NO_SEEDS], [0]).finish()[0]

    def _finish_begun(self, stages: Stages, pending: Any, work: tuple[int, Seeds] | None) -> Any:
        """Wait for the sample of a batch."""
        return pending.finish() if work is None else stages.finish(pending, work[0])

    def _build_begun(self, stages: Stages, sample: Any, work: tuple[int, Seeds] | None) -> Any:
        """Make the batch of a sample; without work, take part in the exchange of its rows."""
        if work is not None:
            return stages.fetch(sample, *work)
        if not isinstance(sample, PlainSample):
            self._build_for_others(sample[0])
        return None

    def _submit_plain(self, exchange: ExchangePlan, nodes: Tensor, key: int) -> Any:
        pending = exchange.submit_plain(nodes, key)
        if self.device.type == "cuda":
            # The batch leaves while the next one is sampled.
            pending.stream = side_streams(self.device.index)[1]
        return pending

    def _find_ready_stream(self) -> Any:
        """Find the stream on which batches are ready; None for the current one."""
        return side_streams(self.device.index)[1] if self.device.type == "cuda" and self._find_plain() else None

    def _find_plain(self) -> ExchangePlan | None:
        """Find the captured plan of batches without types and trees, in no form of PyG's; otherwise None."""
        return None

    def _take_part(self, count: int = 1) -> Any:
        """Take part in the exchanges of other processes' batches with an empty batch.

        Args:
            count: Batches of the step; all have one exchange.
        """
        self._build_for_others(self._sample_none())

    def _build_for_others(self, out: Any) -> None:
        """Build an empty batch, so that the other processes get their rows."""
        if isinstance(self._general, DistAttributes):
            transform, self.transform_sampler_output = self.transform_sampler_output, None
            try:
                self._build(out)
            finally:
                self.transform_sampler_output = transform

    def _build(self, out: Any, memory: list[Any] | None = None, read: Any = None) -> Any:
        rows = None if self.transform_sampler_output is not None or hasattr(out, "is_given") else \
            getattr(out, "node_rows", None)  # fmt: skip
        if read is None and rows is not None and isinstance(self._general, DistAttributes):
            read = self._general.add_edge_rows(rows, out)
        # Also if a transform returns its own output of the same edges.
        self._sampled, self._rows_read = getattr(out, "sampled", None), read
        try:
            return super()._build(out, memory, read)
        finally:
            self._sampled = self._rows_read = None

    def _build_homogeneous(self, out: Any, attributes: Any, is_ours: bool) -> Any:
        if isinstance(attributes, DistAttributes):
            attributes = attributes.knowing(self._sampled, self._rows_read)
        return super()._build_homogeneous(out, attributes, is_ours)

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        lines, attributes = super()._list_places()
        rows = self.graph.rows
        said = (f"rows of other parts: {rows.num_remote:,} fetched, {rows.num_kept:,} found here"
                if self.graph.whole is None else "one graph in the memory of all processes")  # fmt: skip
        planned = [str(self._rows_ahead)] if self._rows_ahead.num_read else []
        return [*lines, said, *planned], attributes

    def __call__(self, index: Any) -> Any:
        """Make the batch of the seeds at these positions; every process calls it, unless the graph is in one memory."""
        if self.graph.whole is not None:
            return super().__call__(index)
        batch = self.graph.communicator.run(super().__call__, index)
        if self.device.type == "cuda":
            # The batch was allocated on the stream of the exchange.
            hold_for(batch, current_stream(self.device.index))
        return batch


# Share of the free GPU memory for the rows that planned batches read again.
_KEPT_SHARE = 0.25


def make_group(stages: Any, work: list[tuple[int, Seeds]], most: int) -> list[Any]:
    """Make the batches of a group."""
    batches: list[Any] = run_stages(stages, work[0][0], work)
    return batches


# Seeds whose times are fetched at a time.
_TIMES_AT_ONCE = 1 << 20


def _forget_times(outs: list[Any]) -> list[Any]:
    """Remove the times of seeds from samples."""
    for out in outs:
        out.metadata = out.metadata[0], None
    return outs


# Options of other loaders that a graph in parts has elsewhere, or does not have.
_ELSEWHERE = {
    "device": "give it to DistGraph",
    "placement": "give it to DistGraph",
    "feature_cache": "give DistGraph device_cache_size",
    "store_dtype": "rows keep the dtype that they were partitioned with",
    "custom_cls": "batches of a graph in parts are a Data or a HeteroData",
    "subgraph_type": "it is 'induced'",
}


def _check_ahead(ahead: Any, graph: DistGraph) -> int:
    """Check the batches of foresight, and return how many there are."""
    if isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead <= MOST_AHEAD:
        raise ArgumentError(f"ahead must be a number of batches in [0, {MOST_AHEAD}] for a graph in parts, got "
                            f"{ahead!r}")  # fmt: skip
    if ahead and graph.whole is not None:
        warn_unused({"ahead": ahead}, "the graph is in one memory (share_graph), and nothing is exchanged")
        return 0
    return ahead


def _options(owner: type, graph: Any, seed: int | None, ranks: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Build the arguments of the base loaders."""
    if not isinstance(graph, DistGraph):
        raise ArgumentError(f"graph must be a DistGraph, got {type(graph).__name__}")
    for name in _ELSEWHERE:
        if name in kwargs:
            raise ArgumentTypeError(f"{owner.__name__} has no option {name}: {_ELSEWHERE[name]}")
    if kwargs.get("num_workers"):
        raise ArgumentError(f"num_workers must be 0 for a graph in parts, got {kwargs['num_workers']}")
    if ranks not in ("auto", "own"):
        raise ArgumentError(f"ranks must be 'auto' or 'own', got {ranks!r}")
    for name in ("sampler", "batch_sampler", "generator") if ranks == "auto" else ():
        if kwargs.get(name) is not None:
            raise ArgumentError(f"{name} needs ranks='own', got ranks='auto', with which processes share the batches "
                                "that the loader itself makes")  # fmt: skip
    size = graph.communicator.size
    if seed is None and ranks == "auto" and len(graph.communicator.run(graph.communicator.agree, 0)) < size:
        raise ArgumentError(f"seed must be given, equal in all {size} clients that share the batches, as they do not "
                            "know each other, got None")  # fmt: skip
    seed = check_seed(seed)
    if ranks == "own":
        # Own seeds, and own draws for them.
        return {"seed": None if seed is None else int(derive_key(seed, graph.rank, 0)), "ranks": None}
    return {"seed": seed, "ranks": (graph.rank, size)}


class DistNeighborLoader(_DistLoader, NodeLoader):
    """Mini-batches around nodes of a graph in parts: PyG's batches, equal to `NeighborLoader` on one machine.

    Every process makes the loader and iterates over it. The owners of the nodes sample their neighbors and send their
    rows, while the previous batch is in use. If the graph lies in one memory (`share_graph` of `DistGraph`), each
    process samples and reads alone. Batches are dealt out in turn, as by `NeighborLoader` with `ranks="auto"`, so that
    all processes together get the batches of one machine.

    A graph in parts cannot be edited: edges, times and weights are those on disk. Writes to rows (`DistGraph.own_rows`)
    may not appear in batches. One warning reports writes of this process; writes of other processes are not detected.
    Keep rows that change in a `DistFeature`.

    Args:
        graph: The graph.
        num_neighbors, replace, subgraph_type, disjoint, temporal_strategy, input_time: See `NeighborLoader`.
        transform, transform_sampler_output, filter_per_worker: See `NeighborLoader`.
        time_comparison, time_window, input_start_time, input_end_time: See `NeighborLoader`.
        input_nodes: Seeds of all processes: ids, a mask, or None for all nodes; with types, a type or (type, seeds).
            Equal in all processes, unless `ranks="own"`.
        time_attr, weight_attr: Any name: sample by the times or weights of the partition.
        ranks: `"auto"`: deal batches out; `"own"`: `input_nodes` are the seeds of this process alone, for instance the
            training nodes of its part, which have more neighbors in the part.
        uneven: Rule for different numbers of batches per process; see `NeighborLoader`. With `ranks="own"`, `pad` gives
            each process the largest number, and `drop` the smallest; all processes then make the loader together.
            Clients of servers agree over their process group.
        seed: Seed of shuffling and draws, equal in all processes. None: each epoch takes a seed from torch's generator
            on rank 0, in a collective call; with `ranks="own"` each process takes its own. Clients of servers that
            share the batches must give a seed.
        prefetch: Batches prepared ahead.
        ahead: Batches whose rows are known before they are requested, up to 128; 0 for none. They are sampled first.
            Then a row of another part that several of them read travels once, and stays until the last of them. A
            quarter of the free memory bounds these rows; if it is short, those stay that are read soonest. Batches do
            not change. Samples of so many batches, and two bytes for each node of the graph, are in memory. Equal in
            all processes.
        input_id: An id for each seed, `[S]` of any dtype, that batches hold instead of its position.
        **kwargs: Arguments of `torch.utils.data.DataLoader` without workers.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        RankError: while iterating, if another process failed or ended.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one process
        >>> manifest = partition_graph("ring", torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_parts=1)
        >>> (batch,) = DistNeighborLoader(DistGraph("ring", device="cpu"), [-1, -1], torch.tensor([2]))
        >>> batch.n_id.tolist(), batch.edge_index.tolist()
        ([2, 1, 0], [[1, 2], [0, 1]])
        >>> dist.destroy_process_group()
    """

    def __init__(self, graph: DistGraph, num_neighbors: FanoutsOf, input_nodes: InputNodes = None,
                 input_time: Tensor | None = None, replace: bool = False, subgraph_type: Subgraph = "directional",
                 disjoint: bool = False, temporal_strategy: str = "uniform", time_attr: str | None = None,
                 weight_attr: str | None = None, transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, filter_per_worker: bool | None = None, *,
                 seed: int | None = None, prefetch: int = 1, ranks: str = "auto", uneven: str = "pad",
                 time_comparison: str = "<=", time_window: int | None = None, input_id: Tensor | None = None,
                 input_start_time: Tensor | None = None, input_end_time: Tensor | None = None, ahead: int = 0,
                 **kwargs: Unpack[TorchOptions]) -> None:  # fmt: skip
        self.graph, options = graph, _options(type(self), graph, seed, ranks, kwargs)
        times = join_windows("input_time", input_time, input_start_time, input_end_time, time_window)
        if times is not None and time_attr is None:
            given = "input_time" if input_start_time is None else "input_start_time"
            raise ArgumentError(f"{given} needs time_attr, to sample by the times of the partition, got None")
        sampler = DistNeighborSampler(
            graph, num_neighbors, subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr,
            seed=options["seed"], time_comparison=time_comparison, time_window=time_window)  # fmt: skip
        super().__init__(graph.skeleton(), sampler, input_nodes, input_time, transform, transform_sampler_output,
                         filter_per_worker, input_id=input_id, device=graph.device, prefetch=prefetch, uneven=uneven,
                         input_start_time=input_start_time, input_end_time=input_end_time,
                         ahead=_check_ahead(ahead, graph), **options, **kwargs)  # fmt: skip
        check_alike(self, ranks)
        self._even_out(ranks)

    # Times of the seeds, int64 `[S]` on the CPU, if they are those of their nodes and batches are made in groups.
    _seed_times: Tensor | None = None

    def _find_plain(self) -> ExchangePlan | None:
        if not self._is_grouped or self.graph.whole is not None or not self.graph.is_homogeneous:
            return None
        plan = self._sampler.open_plan()
        exchange: ExchangePlan | None = plan.find_plain() if isinstance(plan, PartPlan) else None
        # Rows of edges follow the sample.
        return exchange if len(self.graph.part.tables) == 1 else None

    def _fetch_seed_times(self) -> None:
        given, graph = self.input_data, self.graph
        if graph.whole is not None or self._seed_times is not None or given.time is not None:
            return
        if not self._sampler.is_temporal or not any(entry.time is not None for entry in graph.part.manifest.nodes):
            # Otherwise the plan reports missing times of edges.
            return
        communicator = graph.communicator
        # Processes may have different numbers of seeds, and all take part.
        count = max(communicator.run(communicator.agree, -(-given.node.numel() // _TIMES_AT_ONCE)))
        pieces = [given.node[first * _TIMES_AT_ONCE : (first + 1) * _TIMES_AT_ONCE] for first in range(count)]
        kind = given.input_type
        times = [self._sampler._find_times(piece) if kind is None else self._sampler._find_times({kind: piece})[kind]
                 for piece in pieces]  # fmt: skip
        self._seed_times = torch.cat([own.cpu() for own in times]) if times else _NO_SEEDS.nodes

    def _list_inputs(self, seeds: Sequence[Seeds]) -> list[NodeSamplerInput]:
        inputs = super()._list_inputs(seeds)
        if self._seed_times is not None:
            for index, own in zip(inputs, seeds, strict=True):
                index.time = self._seed_times.index_select(0, own.positions)
        return inputs

    def _submit_together(self, seeds: Sequence[Seeds], keys: Sequence[int]) -> Any:
        pending = super()._submit_together(seeds, keys)
        # Batches of seeds with times of their own do not name these.
        return pending if self._seed_times is None or not self._is_grouped else PendingOutput(pending, _forget_times)

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        exchange = self._find_plain()
        if exchange is not None:
            return self._submit_plain(exchange, seeds.nodes, key.of_batch(number))
        return super()._submit(key, number, seeds)

    def _build_sample(self, sample: Sample, positions: Tensor, shared: Mapping[str, SharedRows] = ALONE,
                      memory: list[Any] | None = None) -> Any:  # fmt: skip
        if not isinstance(sample, PlainSample):
            return super()._build_sample(sample, positions, shared, memory)
        known = self.input_data.input_id
        return self._general.build_plain(sample, positions if known is None else known.index_select(0, positions))


class DistSubGraphLoader(DistNeighborLoader):
    """Induced subgraphs around nodes of a graph in parts: all edges among the sampled nodes.

    Args:
        graph, num_neighbors, input_nodes: See `DistNeighborLoader`.
        **kwargs: Further arguments of `DistNeighborLoader`.

    Raises:
        ArgumentTypeError: `subgraph_type` is given.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one process
        >>> manifest = partition_graph("subgraph_ring", torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_parts=1)
        >>> (batch,) = DistSubGraphLoader(DistGraph("subgraph_ring", device="cpu"), [-1, -1], torch.tensor([2]))
        >>> batch.n_id.tolist(), batch.edge_index.tolist()
        ([2, 1, 0], [[1, 2], [0, 1]])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        graph: DistGraph,
        num_neighbors: FanoutsOf,
        input_nodes: InputNodes = None,
        **kwargs: Unpack[DistSubGraphOptions],
    ) -> None:
        if "subgraph_type" in kwargs:
            raise ArgumentTypeError(f"DistSubGraphLoader has no option subgraph_type: {_ELSEWHERE['subgraph_type']}")
        super().__init__(graph, num_neighbors, input_nodes, subgraph_type="induced", **kwargs)


class DistLinkNeighborLoader(_DistLoader, LinkLoader):
    """Mini-batches around links of a graph in parts, equal to `LinkNeighborLoader` on one machine.

    Args:
        graph: The graph.
        num_neighbors, replace, subgraph_type, disjoint, temporal_strategy: See `DistNeighborLoader`.
        time_attr, weight_attr, time_comparison, time_window: See `DistNeighborLoader`.
        input_start_time, input_end_time: See `LinkNeighborLoader`.
        transform, transform_sampler_output, filter_per_worker: See `DistNeighborLoader`.
        seed, prefetch, ahead, ranks, uneven, input_id: See `DistNeighborLoader`.
        edge_label_index: Links, int64 `[2, L]`, sources first; (relation, links) on a graph with types. Equal in all
            processes, unless `ranks="own"`.
        edge_label, edge_label_time, neg_sampling, neg_sampling_ratio, strict_negatives, exclude_target_edges: See
            `LinkNeighborLoader`. On GPUs, strict negatives take two more exchanges per batch, and excluded links one,
            all inside the captured plan. Elsewhere strict negatives take four more per batch, and excluded links two
            for all batches that are made together. If the graph is in one memory, neither takes any.
        rev_edge_type: With `exclude_target_edges="reverse"`: the relation of the reverse edges. It must be given unless
            it is named `rev_...` or no relation leads back, as no process can compare the edges of all parts.
        **kwargs: Arguments of `torch.utils.data.DataLoader` without workers.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        RankError: while iterating, if another process failed or ended.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one process
        >>> manifest = partition_graph("link_ring", torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_parts=1)
        >>> (batch,) = DistLinkNeighborLoader(DistGraph("link_ring", device="cpu"), [-1], torch.tensor([[0], [2]]))
        >>> batch.n_id.tolist(), batch.edge_label_index.tolist()
        ([0, 2, 1, 3], [[0], [1]])
        >>> dist.destroy_process_group()
    """

    def __init__(self, graph: DistGraph, num_neighbors: FanoutsOf, edge_label_index: InputLinks,
                 edge_label: Tensor | None = None, edge_label_time: Tensor | None = None, replace: bool = False,
                 subgraph_type: Subgraph = "directional", disjoint: bool = False, temporal_strategy: str = "uniform",
                 neg_sampling: Negatives = None, neg_sampling_ratio: float | None = None, time_attr: str | None = None,
                 weight_attr: str | None = None, transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, filter_per_worker: bool | None = None, *,
                 strict_negatives: bool = False, exclude_target_edges: bool | str = False, seed: int | None = None,
                 prefetch: int = 1, ranks: str = "auto", uneven: str = "pad", time_comparison: str = "<=",
                 time_window: int | None = None, input_id: Tensor | None = None, rev_edge_type: EdgeType | None = None,
                 input_start_time: Tensor | None = None, input_end_time: Tensor | None = None, ahead: int = 0,
                 **kwargs: Unpack[TorchOptions]) -> None:  # fmt: skip
        self.graph, options = graph, _options(type(self), graph, seed, ranks, kwargs)
        check_strict(strict_negatives, neg_sampling, neg_sampling_ratio)
        times = join_windows("edge_label_time", edge_label_time, input_start_time, input_end_time, time_window)
        if (times is None) != (time_attr is None):
            raise ArgumentError("edge_label_time and time_attr must be given together")
        has_links = isinstance(edge_label_index, Tensor) or (
            isinstance(edge_label_index, (tuple, list)) and len(edge_label_index) == 2
            and isinstance(edge_label_index[1], Tensor))  # fmt: skip
        several = None if graph.is_homogeneous or has_links else tell_several(edge_label_index)
        if several is not None:
            raise ArgumentTypeError(several)
        if not has_links:
            raise ArgumentError("edge_label_index must hold links, as no process has all edges of the graph")
        sampler = DistNeighborSampler(
            graph, num_neighbors, subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr,
            seed=options["seed"], time_comparison=time_comparison, time_window=time_window,
            strict_negatives=strict_negatives, exclude_target_edges=exclude_target_edges,
            rev_edge_type=rev_edge_type)  # fmt: skip
        super().__init__(graph.skeleton(), sampler, edge_label_index, edge_label, edge_label_time, neg_sampling,
                         neg_sampling_ratio, transform, transform_sampler_output, filter_per_worker, input_id=input_id,
                         device=graph.device, prefetch=prefetch, uneven=uneven, input_start_time=input_start_time,
                         input_end_time=input_end_time, ahead=_check_ahead(ahead, graph), **options,
                         **kwargs)  # fmt: skip
        check_alike(self, ranks)
        self._even_out(ranks)
        if graph.whole is not None and strict_negatives and neg_sampling is not None:
            kind = graph.edge_types[0] if self.input_data.input_type is None else self.input_data.input_type
            if kind in graph.edge_types:
                graph.whole.edge_set(kind)
