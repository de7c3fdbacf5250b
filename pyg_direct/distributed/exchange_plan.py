"""`ExchangePlan`: batches of a graph in parts as one captured plan, with exchanges inside.

Design. A hop of `HeteroGpuPlan` lists its work, picks, and numbers the new nodes. Here only the pick differs:

1. The frontier is grouped by owner into segments of fixed length, which are exchanged.
2. Owners list the work of all segments, and pick with the kernels of one GPU. Their edges are packed into segments of
   fixed length, and exchanged. Draws depend on key, node and slot, so that they are the draws of one process.
3. The own work list finds its edges in the answers, and the kernel that picks copies them in its own order.

If batches leave out the edges of their links, these pairs go to all ranks first, in one exchange. Each rank finds the
edges that it holds, and leaves them out of its picks.

Strict negatives are known before all else, in two exchanges. All ranks get the first candidates of each negative, and
answer which are edges of their parts. If a negative needs more candidates, the batch is sampled again.

An induced subgraph has one request more, for all edges of the nodes of all hops, of which it keeps those among them.

No size travels to the host between hops (`kernels/sampling/frontier_segments.py`). After the last hop a few words give
each rank the largest needs of all; they go with the ids of rows, if there are rows. If a segment, or a buffer of one
rank, was too small, all ranks sample the batch again with room for these needs. So the lengths of segments are equal on
all ranks at any time.

A `Transport` moves segments: `NcclSegments` on GPUs, whose exchanges are captured in the graphs of a batch. Rows have a
graph of their own, which runs beside the hops of the next batch. Its exchanges go by a second group of NCCL. All ranks
submit the graphs of both in one order, so that no rank can wait for another in a circle.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED, THREADS
from pyg_direct.distributed.captured_rows import CapturedRows, RowRoom, RowSlot
from pyg_direct.distributed.graph_part import GraphPart, PartTopo
from pyg_direct.distributed.partitioning.manifest import table_dtype
from pyg_direct.errors import PartitionError
from pyg_direct.kernels.batch_counters import EDGES, NODES, STATE
from pyg_direct.kernels.sampling import captured_hops, frontier_segments, hetero, weighted_gpu, worklist
from pyg_direct.kernels.sampling.excluded_edges import sort_edges_gpu
from pyg_direct.kernels.sampling.link_ends import choose_negatives_gpu, draw_candidates_gpu, find_candidates_gpu
from pyg_direct.kernels.sampling.worklist import BY_PLACE, COLUMNS, TIMED
from pyg_direct.ops.argument_checks import check_key
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import grid_for, run_gpu
from pyg_direct.runtime.comm.nccl_segments import Exchange, Transport
from pyg_direct.runtime.cuda.graph_capture import CapturedGraph
from pyg_direct.runtime.cuda.launch import current_stream
from pyg_direct.sampling.captured_plan import Pending
from pyg_direct.sampling.hetero_gpu import LAST_EDGE, Capacity, HeteroGpuPlan, Layout, Slot
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.hetero_sample import GeneralSample
from pyg_direct.sampling.negative_links import TRIES
from pyg_direct.sampling.sampling_options import Sample
from pyg_direct.sampling.seeds import Ends, Request, SeedList

# Nodes and edges of a segment, and pairs whose edges are left out, before batches show how many they need.
_FIRST_NODES, _FIRST_EDGES, _FIRST_PAIRS = (4, 8, 2) if SIMULATED else (1024, 8192, 1024)
# Candidates of a strict negative before batches show how many they need.
_FIRST_TRIES = 1 if SIMULATED else 4
# Words that the length of a segment is a multiple of, so that all of them are aligned.
_ALIGNED = 16
# Nodes whose owners are counted at a time.
_NODES_AT_ONCE = 1 << 24


class Room(NamedTuple):
    """Room of segments, equal on all ranks: for nodes and edges by request, and for rows by node type.

    `pairs` has the pairs of a batch whose edges are left out, and those edges of all batches that a rank holds; it is
    empty if no edges are left out. `negatives` has the strict negatives of a batch, and the candidates of each; it is
    empty without.
    """

    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    rows: RowRoom = RowRoom()
    pairs: tuple[int, ...] = ()
    negatives: tuple[int, ...] = ()

    def grow(self, needs: list[int]) -> Room:
        """Return room for needs, with head-room: by request nodes and edges, then of rows, pairs and negatives."""

        def widen(room: Sequence[int], own: list[int]) -> tuple[int, ...]:
            return tuple(max(size, need + need // 4) for size, need in zip(room, own, strict=True))

        of_requests, first, last = needs[: 2 * len(self.nodes)], self.first_pair_need, self.first_negative_need
        negatives = widen(self.negatives, needs[last:])
        return Room(widen(self.nodes, of_requests[::2]), widen(self.edges, of_requests[1::2]),
                    self.rows.grow(needs[len(of_requests) : first]), widen(self.pairs, needs[first:last]),
                    (negatives[0], min(TRIES, negatives[1])) if negatives else ())  # fmt: skip

    @property
    def first_pair_need(self) -> int:
        """First word of the needs of pairs."""
        return 2 * len(self.nodes) + 2 * len(self.rows.others)

    @property
    def first_negative_need(self) -> int:
        """First word of the needs of negatives."""
        return self.first_pair_need + len(self.pairs)

    @property
    def num_words(self) -> int:
        """Words of the needs of a batch, without flags."""
        return self.first_negative_need + len(self.negatives)


class StrictPairs(NamedTuple):
    """Edges of a relation in this part, which negatives of all ranks avoid.

    Attributes:
        edges: source * number of targets + target of each edge, int64 `[E]`, ascending.
        is_triplet: True if only targets have negatives.
    """

    edges: Tensor
    num_targets: int
    types: tuple[int, int]
    is_triplet: bool


@dataclass
class PlainSample(Sample):
    """A sample of a graph without types and trees, with the rows of its nodes by attribute."""

    rows: dict[str, Tensor] = field(default_factory=dict)


class PlainPending(Pending):
    """A batch on its way to a `PlainSample`."""


def _pad(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


# Words of a pair whose edges are left out.
_PAIR = 3


def _pair_length(room: int, num_words: int = _PAIR) -> int:
    """Count the words of a segment of so many pairs."""
    return _pad(1 + num_words * room)


class ExchangeSlot(Slot):
    """Slot with the segments of a batch, and the buffers of an owner that picks for all ranks."""

    def __init__(self, plan: ExchangePlan, capacity: Capacity) -> None:
        super().__init__(plan, capacity)
        device, topo, parts, room = plan.topology.device, plan.topology.topo, plan.num_parts, plan.room
        relations = len(topo.edge_types)
        most_nodes, most_edges = max(room.nodes, default=0), max(room.edges, default=0)

        def reserve(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.room = room
        (num_pairs, num_found), (num_negatives, tries) = room.pairs or (0, 0), room.negatives or (0, 0)
        words = parts * max(plan.node_length(most_nodes), room.num_words + 2, _pair_length(num_pairs),
                            _pair_length(num_negatives, max(tries, 1)))  # fmt: skip
        # Their number, relations, expanded nodes and neighbors.
        self.pairs = torch.zeros(1 + _PAIR * num_pairs, dtype=torch.int64, device=device)
        # Number of negatives and their candidates; those that this rank knows to be avoided, and that are late.
        self.candidates = torch.zeros(1 + num_negatives * tries, dtype=torch.int64, device=device)
        self.known, self.untimely = reserve(num_negatives), reserve(num_negatives)
        self.num_found, self.found_edges = reserve(1), reserve(num_found)
        self.excluded = torch.full((num_found,), LAST_EDGE, dtype=torch.int64, device=device)
        # Kernels that are loaded before the first exchange find segments without nodes.
        self.to_send, self.received = torch.zeros(2, words, dtype=torch.int64, device=device).unbind()
        answers = parts * max((plan.answer_items(n) + 2 * e for n, e in zip(*room[:2], strict=True)), default=0)
        self.answers, self.answers_back = torch.zeros(2, answers, dtype=topo.word_dtype, device=device).unbind()
        self.needs = torch.zeros(room.num_words + 2, dtype=torch.int64, device=device)
        self.need_box = torch.zeros(self.needs.numel(), dtype=torch.int64, pin_memory=device.type == "cuda",
                                    device="cpu")  # fmt: skip
        self.need_words: np.ndarray = self.need_box.numpy()
        self.places, self.slots = reserve(words), reserve(self.nodes.numel())
        self.bases = reserve(parts * relations)
        self.owner_counts = torch.zeros(parts * len(topo.node_types), dtype=torch.int32, device=device)
        # Of the owner's side.
        items = parts * plan.answer_items(most_nodes)
        self.asked_work = reserve((parts + 1) * relations * COLUMNS)
        self.asked_state = torch.zeros(STATE, dtype=torch.int64, device=device)
        self.asked_starts, self.asked_sizes, self.asked_counts = (reserve(items) for _ in range(3))
        self.asked_offsets = torch.zeros(items + 1, dtype=torch.int64, device=device)
        self.asked_draws, self.asked_sources, self.asked_ids, self.asked_targets = (
            reserve(parts * most_edges) for _ in range(4)
        )
        # Of windows, whose times stand side by side.
        self.asked_times = reserve(plan.num_times * words if plan.num_times > 1 else 0)
        self.asked_repeats = reserve(parts * most_edges, torch.uint8)
        self.asked_scores = reserve(parts * most_edges if plan.is_weighted else 0, torch.float64)
        # Of the exchange of rows by itself.
        self.row_graph: CapturedGraph | None = None
        self.row_bytes = 0
        self.picked = torch.cuda.Event() if device.type == "cuda" else None
        self.own_rows = None if plan.node_rows is None else RowSlot(
            plan.node_rows, room.rows, self.nodes.numel(), self.needs.numel())  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return super().num_bytes + (0 if self.own_rows is None else self.own_rows.num_bytes)


class ExchangePlan(HeteroGpuPlan):
    """Plan of one rank for batches of a graph in parts; every rank makes one, and submits as many batches.

    Args:
        plan: The plan with the rows, flags and rules to use.
        node_rows: Rows of nodes that batches have; None for batches without.
        sent: Gets the bytes sent to other ranks, head-room of segments included: `rows`, and `hops` for all else.
        repeats: True if nodes may stand several times among the seeds, as the ends of links; see `HeteroGpuPlan`.
        excludes: True if batches leave out edges; equal on all ranks.
        strict: Edges that negatives avoid, given on all ranks or on none. Then `submit` takes links alone, also a list
            of none.

    Attributes:
        room: Room of segments, equal on all ranks.
        id_starts: Number that turns a node of a slot into an id of the id space of all types, int64 `[T]`.
    """

    _slot_class = ExchangeSlot
    _is_awaited = True

    def __init__(self, part: GraphPart, plan: GeneralPlan, transport: Transport,
                 node_rows: CapturedRows | None = None, sent: Counter[str] | None = None, *,
                 repeats: bool = False, excludes: bool = False, strict: StrictPairs | None = None
                 ) -> None:  # fmt: skip
        topology: Any = plan.topology
        topo: PartTopo = topology.topo
        all_edges = np.full(len(topo.edge_types), -1)
        super().__init__(topology, plan.fanouts, plan.rules, plan.rows, plan.flags, disjoint=plan.disjoint,
                         repeats=repeats, num_batches=1, max_degree=plan.recipe.max_degree,
                         last_fanouts=all_edges if plan.recipe.subgraph_type == "induced" else None)  # fmt: skip
        self._asked_fanouts = self.fanouts if self.last_fanouts is None else np.concatenate(
            [self.fanouts, self.last_fanouts[None]])  # fmt: skip
        # A graph without relations has nothing to ask for.
        self.num_requests = len(self._asked_fanouts) if topo.edge_types else 0
        device = topology.device
        self.owners = _join_books(part, topo, device)
        self.transport, self.num_parts = transport, part.num_parts
        self._is_captured = not SIMULATED and transport.is_captured
        self._is_trial = False
        self._graphs: weakref.WeakSet[CapturedGraph] = weakref.WeakSet()
        # By which an exchange goes now. Rows go beside the hops of the next batch, if the transport can.
        self._lane: Exchange = transport
        self._row_lane: Exchange = transport if node_rows is None or transport.beside is None else transport.beside
        has_stream = device.type == "cuda" and self._row_lane is not transport
        self._row_stream = torch.cuda.Stream(device, priority=-1) if has_stream else None
        # One whose hops are sampled, one whose rows are exchanged, and one that is ready or next.
        self._most_slots = 3
        self.node_rows = node_rows
        rows = RowRoom() if node_rows is None else node_rows.first_room()
        self._excludes = excludes and self.num_requests > 0
        self.room = Room((_FIRST_NODES,) * self.num_requests, (_FIRST_EDGES,) * self.num_requests, rows,
                         (_FIRST_PAIRS,) * 2 if self._excludes else (),
                         () if strict is None else (_FIRST_PAIRS, _FIRST_TRIES))  # fmt: skip
        self._strict = strict
        self._tables: tuple[Any, ...] = ()
        self._sent: Counter[str] = Counter() if sent is None else sent
        # Bytes that a batch sends without the rows.
        self._hop_bytes = 0
        self._directory, self._num_ids = part.find_directory()
        # Without trees, nodes stand as ids of the id space already.
        starts = topo.type_starts[:-1]
        self.id_starts = upload(starts if plan.disjoint else np.zeros_like(starts), device)
        per_type = np.bincount(topo.expanded, minlength=len(topo.node_types))
        self._most_relations = int(per_type.max(initial=0))
        self._asked_template = upload(self._list_asked_templates(part, plan), device)
        # Of the expanded nodes of each relation: start of their type, and shift of their positions to rows.
        own = topo.type_starts[topo.expanded], topo.row_starts[:-1] - part.own_starts[topo.expanded]
        self._pair_starts, self._row_shifts = upload(np.stack(own), device).unbind()
        self._none = self.id_starts[:0]
        transport.hold(self)

    def sample(self, requests: Sequence[Request] | Sequence[Ends], keys: Sequence[int], excluded: Tensor | None = None
               ) -> list[GeneralSample]:  # fmt: skip
        """Sample the batch of a rank under its key; all ranks call it together, in one order.

        Args:
            requests: Seeds of one batch, and their times; there may be no seeds. Or its links.
            excluded: Pairs whose edges the batch leaves out: relations, expanded nodes and neighbors of `list_pairs`,
                int64 `[3, P]`; None for none, if the plan does not exclude.
        """
        for key in keys:
            check_key("key", key)
        samples: list[GeneralSample] = self.submit(requests, keys, excluded).finish()
        return samples

    def node_length(self, room: int) -> int:
        """Count the words of a segment of so many nodes."""
        fields = 1 + self.disjoint + self.num_times * self.topology.topo.is_temporal
        return _pad(len(self.topology.topo.node_types) + 1 + fields * room)

    def answer_items(self, room: int) -> int:
        """Count the words for the items of so many nodes."""
        return _pad(room * self._most_relations + 1)

    def list_templates(self, layout: Layout) -> np.ndarray:
        """As of one GPU, but owners have chosen the edges already: all of an answer are taken."""
        words = super().list_templates(layout).reshape(-1, COLUMNS)
        words[..., worklist.FANOUT] = np.where(words[..., worklist.FANOUT] != 0, -1, 0)
        return words.reshape(-1)

    def _list_asked_templates(self, part: GraphPart, plan: GeneralPlan) -> np.ndarray:
        """Words of the entries of an owner's work lists that do not depend on a batch, int64 `[R * COLUMNS]` a
        request."""
        topo = self.topology.topo
        words = np.zeros((*self._asked_fanouts.shape, COLUMNS), np.int64)
        own_starts = topo.type_starts[topo.expanded]
        words[..., worklist.RELATION], words[..., worklist.FANOUT] = (
            np.arange(len(topo.edge_types)),
            self._asked_fanouts,
        )
        # Rows are found by positions among all nodes of the part, draws by ids within the type.
        words[..., worklist.ROWS] = topo.row_starts[:-1] - part.own_starts[topo.expanded] + own_starts
        words[..., worklist.OWN_START], words[..., worklist.EDGES] = own_starts, topo.edge_starts[:-1]
        words[..., worklist.FRONT] = topo.expanded
        words[..., worklist.FLAGS] = plan.flags | np.where(plan.flags & TIMED, BY_PLACE, 0)
        return words.reshape(-1)

    def _count_excluded(self, pending: Pending) -> int:
        # The room for them is agreed.
        return 0

    def _write_excluded(self, slot: Any, excluded: Tensor) -> None:
        count, room = excluded.shape[1], slot.room.pairs[0]
        slot.pairs[0] = count
        if 0 < count <= room:
            slot.pairs[1:].view(3, room)[:, :count].copy_(excluded)

    def _exclude(self, slot: Any, stream: int) -> None:
        """Tell all ranks the pairs of this rank's batch, and find the edges here that batches leave out."""
        (room, _), parts, need = slot.room.pairs, self.num_parts, slot.room.first_pair_need
        length, rows = _pair_length(room), self.rows
        run_gpu(frontier_segments.send_pairs_gpu, grid_for(parts * slot.pairs.numel(), slot.state), slot.pairs, _PAIR,
                parts, length, slot.to_send, slot.num_found, slot.needs, need, stream=stream)  # fmt: skip
        self._exchange(slot.to_send, slot.received, length, stream)
        run_gpu(frontier_segments.find_pair_edges_gpu, max(1, min(self._scratch.block_sums.numel(), parts * room)),
                slot.received, parts, room, length, self._pair_starts, self._row_shifts, self._num_ids,
                *self._directory, rows.indptr, rows.indices, slot.num_found, slot.found_edges, slot.needs, need + 1,
                stream=stream)  # fmt: skip
        run_gpu(sort_edges_gpu, grid_for(slot.excluded.numel(), slot.state), slot.num_found, 0, slot.found_edges,
                slot.excluded, stream=stream)  # fmt: skip

    def _write_inbox(self, slot: Any, pending: Pending) -> None:
        super()._write_inbox(slot, pending)
        if self._strict is None:
            return
        (ends,) = pending.seeds[0].requests
        sources, targets = (nodes.tables for nodes in ends.nodes)
        run_gpu(draw_candidates_gpu, grid_for(ends.more_targets, slot.state), slot.candidates, slot.known,
                slot.untimely, slot.inbox, self.find_seeds(), ends.width, int(ends.is_triplet), *sources, *targets,
                slot.room.negatives[1], ends.avoided.find_links())  # fmt: skip

    def _avoid(self, slot: Any, strict: StrictPairs, stream: int) -> None:
        """Ask all ranks which candidates of this rank's negatives are edges, and choose others."""
        (room, tries), parts, need = slot.room.negatives, self.num_parts, slot.room.first_negative_need
        length, answer_length, words = _pair_length(room, tries), _pad(room), slot.candidates
        run_gpu(frontier_segments.send_pairs_gpu, grid_for(parts * words.numel(), slot.state), words, tries, parts,
                length, slot.to_send, slot.num_found, slot.needs, need, stream=stream)  # fmt: skip
        self._exchange(slot.to_send, slot.received, length, stream)
        run_gpu(find_candidates_gpu, grid_for(parts * room, slot.state), slot.received, parts, tries, room, length,
                strict.edges, slot.to_send, answer_length, stream=stream)  # fmt: skip
        self._exchange(slot.to_send, slot.received, answer_length, stream)
        run_gpu(choose_negatives_gpu, grid_for(room, slot.state), words, slot.known, slot.untimely, tries, TRIES,
                slot.received, parts, answer_length, slot.inbox, self.find_seeds(),
                len(self.topology.topo.node_types), *strict.types, int(strict.is_triplet), strict.num_targets,
                slot.arrived, slot.needs, need + 1, stream=stream)  # fmt: skip

    def _has_room(self, slot: ExchangeSlot, pending: Pending) -> bool:  # type: ignore[override]
        return slot.room == self.room and super()._has_room(slot, pending)

    def _count_slot_bytes(self, capacity: Capacity) -> int:
        nodes, edges = max(self.room.nodes, default=0), max(self.room.edges, default=0)
        own = 24 * self.node_length(nodes) + 40 * self.answer_items(nodes) + (33 + 4 * 8 + 8 * self.is_weighted) * edges
        if self.node_rows is not None:
            own += self.node_rows.count_bytes(self.room.rows, capacity.edges + capacity.seeds) // self.num_parts
        return super()._count_slot_bytes(capacity) + self.num_parts * own

    def submit(self, *args: Any, **options: Any) -> Pending:
        """Enqueue a batch; see `HeteroGpuPlan.submit`."""
        self._find_tables()
        return super().submit(*args, **options)

    @property
    def is_plain(self) -> bool:
        """True if batches can be `PlainSample`s: of a graph without types, times and trees, with rows."""
        topo = self.topology.topo
        return topo.is_homogeneous and not topo.is_temporal and not self.disjoint and self.node_rows is not None

    def submit_plain(self, seeds: Tensor, key: int) -> Pending:
        """Enqueue a batch that becomes a `PlainSample`, if `is_plain`, in a third of the host's time of `submit`.

        Args:
            seeds: Different nodes of the graph, int64 `[B]` on the host; they are not checked.
            key: Unsigned 64-bit key of its draws.
        """
        self._find_tables()
        count = seeds.numel()
        return self._submit(PlainPending(self, (SeedList(seeds, None, [count], [0], count), None, 1), [key]))

    def _find_tables(self) -> None:
        """Release graphs that read tables at places where they no longer are."""
        if self.node_rows is not None and self._tables != (tables := self.node_rows.find_tables()):
            self._tables = tables
            self._drop_slots()

    def _drop_slots(self) -> None:
        with self._lock:
            while self._pending:
                self.finish(self._pending[0])
            self._slots.clear()

    def _enqueue_once(self, slot: Any, stream: int) -> None:
        self._is_trial = True
        try:
            super()._enqueue_once(slot, stream)
            if self.node_rows is not None:
                self._enqueue_rows(slot, stream)
        finally:
            self._is_trial = False

    def _wait(self, sized: torch.cuda.Event) -> None:
        self.transport.wait(sized)

    def exchange(self, to_send: Tensor, received: Tensor, stream: int) -> None:
        """Enqueue an exchange of segments, unless kernels are only tried."""
        if not self._is_trial:
            self._lane.exchange(to_send, received, stream)
            self._hop_bytes += to_send.nbytes // self.num_parts * (self.num_parts - 1)

    def exchange_with_others(self, to_send: Tensor, received: Tensor, stream: int) -> None:
        """As `exchange`, without segments of this rank."""
        if not self._is_trial:
            self._lane.exchange_with_others(to_send, received, stream)

    def _exchange(self, to_send: Tensor, received: Tensor, length: int, stream: int) -> None:
        size = self.num_parts * length
        self.exchange(to_send[:size], received[:size], stream)

    def _capture(self, slot: Any, index: int) -> None:
        super()._capture(slot, index)
        # At once: the other capture may raise, and its error holds this graph.
        self._graphs.add(slot.graph)
        if self.node_rows is not None:
            slot.row_graph = CapturedGraph(lambda stream: self._enqueue_rows(slot, stream), index)
            self._graphs.add(slot.row_graph)

    def release(self) -> bool:
        """Give the buffers back as other plans do, and destroy the graphs, which errors of batches may still hold."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not super().release():
                return False
            for graph in list(self._graphs):
                graph.release()
            return True
        finally:
            self._lock.release()

    def _end_batch(self, slot: Any, stream: int) -> None:
        if self.node_rows is None:
            super()._end_batch(slot, stream)
        else:
            self._end_with_rows(slot, stream)
        if slot.sized is not None:
            self.transport.follow(slot.sized)

    def _end_with_rows(self, slot: Any, stream: int) -> None:
        if self._row_stream is not None:
            slot.picked.record(current_stream(slot.index))
            slot.picked.wait(self._row_stream)
            stream = self._row_stream.cuda_stream
        if slot.row_graph is None:
            self._enqueue_rows(slot, stream)
        else:
            slot.row_graph.replay(stream)
        if slot.sized is not None:
            slot.sized.record(self._row_stream)

    def _enqueue_rows(self, slot: Any, stream: int) -> None:
        """Enqueue the exchange of rows, with which needs go."""
        assert self.node_rows is not None
        self._lane, self._hop_bytes = self._row_lane, 0
        try:
            self.node_rows.enqueue(self, slot, stream)
        finally:
            self._lane = self.transport
        slot.row_bytes = self._hop_bytes

    def _enqueue(self, slot: Any, stream: int) -> None:
        self._hop_bytes = 0
        if self._strict is not None:
            self._avoid(slot, self._strict, stream)
        if self._excludes:
            self._exclude(slot, stream)
        super()._enqueue(slot, stream)
        if self.node_rows is None:
            count = slot.needs.numel()
            self.send_needs(slot, count, 0, slot.to_send, stream)
            self._exchange(slot.to_send, slot.received, count, stream)
            self.agree_needs(slot, count, 0, slot.received, stream)
        slot.hop_bytes = self._hop_bytes

    def _pick(self, slot: Any, work: Tensor, hop: int, stage: int, stream: int) -> None:
        if not self.num_requests:
            super()._pick(slot, work, hop, stage, stream)
            return
        nodes, edges = slot.room.nodes[hop], slot.room.edges[hop]
        num_items = self.answer_items(nodes)
        self._ask(slot, hop, nodes, stream)
        self._answer(slot, hop, nodes, edges, num_items, stream)
        self._exchange(slot.answers, slot.answers_back, num_items + 2 * edges, stream)
        scratch, layout, relations = self._scratch, slot.layout, len(self.topology.topo.edge_types)
        full = scratch.block_sums.numel()
        item_grid = max(1, min(full, -(-slot.capacity.items // THREADS)))
        run_gpu(frontier_segments.read_answers_gpu, item_grid, work, slot.slots, relations, slot.bases, nodes,
                num_items, edges, slot.answers_back, slot.starts, slot.sizes, slot.counts, scratch.block_sums,
                stream=stream)  # fmt: skip
        run_gpu(captured_hops.place_items_gpu, item_grid, slot.state, stage, slot.capacity.edges, work, slot.counts,
                scratch.block_sums, slot.offsets, stream=stream)  # fmt: skip
        run_gpu(hetero.pick_items_gpu, full, hop, 0, layout.tree_shift, work, slot.answers_back,
                slot.answers_back[edges:], self._none, slot.nodes, slot.trees, slot.starts, slot.sizes, slot.offsets,
                slot.draws, slot.repeats, slot.sources, slot.ids, slot.targets, *self._list_marks(slot, hop),
                stream=stream)  # fmt: skip

    def _ask(self, slot: Any, hop: int, nodes: int, stream: int) -> None:
        """Send the nodes of a hop to their owners; behind the last hop, the nodes of all hops."""
        topo, length = self.topology.topo, self.node_length(nodes)
        types, template = len(topo.node_types), hop * slot.work.numel()
        # The nodes are not counted here: a full grid, unless there are few nodes at all.
        grid = grid_for(slot.nodes.numel(), slot.state)
        first, num_hops = (hop * (types + 1), 1) if hop < self.num_hops else (0, self.num_hops + 1)
        frontier = slot.begins, first, num_hops, types, slot.nodes
        run_gpu(frontier_segments.count_owners_gpu, grid, *frontier, self.id_starts, self.num_parts,
                *self.owners, slot.owner_counts, slot.slots, stream=stream)  # fmt: skip
        run_gpu(frontier_segments.fill_segments_gpu, grid, *frontier, slot.trees, self.num_times, slot.seed_times,
                self.id_starts, slot.inbox, self.num_parts, nodes, length, slot.template, template, slot.bases,
                slot.owner_counts, slot.slots, slot.to_send, slot.needs, 2 * hop, stream=stream)  # fmt: skip
        self._exchange(slot.to_send, slot.received, length, stream)

    def _answer(self, slot: Any, hop: int, nodes: int, edges: int, num_items: int, stream: int) -> None:
        """Pick the edges that all ranks ask for, and pack them."""
        topo, rows, rules, parts = self.topology.topo, self.rows, self.rules, self.num_parts
        types, length, full = len(topo.node_types), self.node_length(nodes), self._scratch.block_sums.numel()
        sums, replace, work = self._scratch.block_sums, int(rules.replace), slot.asked_work
        item_grid = max(1, min(full, -(-parts * num_items // THREADS)))
        trees = slot.received[nodes:] if self.disjoint else self._none
        times = self._none if not topo.is_temporal else slot.received[2 * nodes :] if self.num_times == 1 else \
            slot.asked_times  # fmt: skip
        found = slot.asked_starts, slot.asked_sizes
        run_gpu(frontier_segments.list_asked_gpu, 1, self._asked_template, hop * len(topo.edge_types) * COLUMNS,
                slot.received, types, parts, length, slot.owner_counts, work, stream=stream)  # fmt: skip
        run_gpu(frontier_segments.locate_asked_gpu, grid_for(parts * nodes, slot.state), slot.received, types, parts,
                nodes, length, 0, self._num_ids, *self._directory, slot.needs, slot.places, self.num_times,
                slot.asked_times, stream=stream)  # fmt: skip
        run_gpu(hetero.count_items_gpu, item_grid, work, rows.indptr, rows.indices, rows.node_time, rows.edge_time,
                rows.edge_weight, slot.places, trees, times, slot.excluded, replace, int(rules.last), int(rules.strict),
                rules.window, *found, slot.asked_counts, sums, stream=stream)  # fmt: skip
        run_gpu(captured_hops.place_items_gpu, item_grid, slot.asked_state, 0, parts * edges, work, slot.asked_counts,
                sums, slot.asked_offsets, stream=stream)  # fmt: skip
        if self.is_weighted and hop < self.num_hops:
            run_gpu(weighted_gpu.pick_weighted_gpu, full, hop, replace, work, rows.edge_weight, rows.weight_before,
                    slot.excluded, slot.received, trees, *found, slot.asked_offsets, slot.asked_draws,
                    stream=stream)  # fmt: skip
            if not replace:
                run_gpu(weighted_gpu.pick_long_rows_gpu, full, hop, work, rows.edge_weight, slot.excluded,
                        slot.received, trees, *found, slot.asked_offsets, slot.asked_scores, slot.asked_draws,
                        stream=stream)  # fmt: skip
        picked = slot.asked_sources, slot.asked_ids, slot.asked_targets
        unmarked = self._scratch.fresh[:0], self._scratch.touched[:0], 0, slot.bucket_counts[:0], slot.ranks[:0]
        run_gpu(hetero.pick_items_gpu, full, hop, replace, 0, work, rows.indices, rows.edge_ids, slot.excluded,
                slot.received, trees, *found, slot.asked_offsets, slot.asked_draws, slot.asked_repeats, *picked,
                *unmarked, stream=stream)  # fmt: skip
        run_gpu(frontier_segments.pack_answers_gpu, grid_for(parts * max(num_items, edges), slot.state), work, parts,
                slot.asked_state, EDGES + 1, slot.asked_offsets, *picked, trees, num_items, edges, slot.answers,
                slot.needs, 2 * hop + 1, stream=stream)  # fmt: skip

    def send_needs(self, slot: Any, length: int, first: int, to_send: Tensor, stream: int) -> None:
        """Write the needs of the batch to the segments for all ranks, of `length` words each, from word `first` on."""
        # The words of the state are clear again, but the host has them.
        run_gpu(frontier_segments.send_needs_gpu, 1, slot.needs, slot.outbox, self.num_parts, length, first, to_send,
                stream=stream)  # fmt: skip

    def agree_needs(self, slot: Any, length: int, first: int, received: Tensor, stream: int) -> None:
        """Leave the largest needs of all ranks to the host, after the exchange of these segments."""
        run_gpu(frontier_segments.agree_needs_gpu, 1, received, self.num_parts, length, first, slot.needs,
                slot.need_box, stream=stream)  # fmt: skip

    def _find_larger(self, slot: Any, pending: Pending) -> Capacity | None:
        needs = slot.need_words.tolist()
        if needs.pop():
            raise PartitionError("parts must hold the nodes that the manifest gives them, and one does not: the "
                                 "partition is damaged")  # fmt: skip
        if not any(needs):
            return super()._find_larger(slot, pending)
        # All ranks sample it again, even one whose own seeds are bad.
        self.room = self.room.grow(needs[:-1])
        return self._grow(slot) or slot.capacity

    def _export(self, slot: Any, pending: Pending) -> list[GeneralSample] | PlainSample:  # type: ignore[override]
        self._sent["hops"] += slot.hop_bytes + slot.row_bytes
        if self.node_rows is not None:
            self._sent["rows"] += slot.own_rows.num_answer_bytes
        if isinstance(pending, PlainPending):
            return self._export_plain(slot)
        samples = super()._export(slot, pending)
        if self.node_rows is not None:
            for sample in samples:
                sample.rows = self.node_rows.take(slot.own_rows, sample)
        return samples

    def _export_plain(self, slot: Any) -> PlainSample:
        """Copy a batch without types into as few tensors as there can be."""
        hops, words = self.num_hops, slot.outbox_words[:STATE].tolist()
        node_counts, edge_counts = words[NODES : NODES + hops + 1], words[EDGES : EDGES + hops + 1]
        num_nodes, num_edges = node_counts[-1], edge_counts[-1]
        # The kernel writes the starts of types and of relations, of which there is one each, behind the nodes.
        nodes, memory = slot.arrived.new_empty(num_nodes + 6), slot.arrived.new_empty(3 * num_edges)
        ends, e_id = memory.unsafe_split_with_sizes([2 * num_edges, num_edges])
        slot.export_batch(grid_for(max(num_nodes, num_edges), slot.state), (nodes, ends, e_id, num_nodes, 0))
        assert self.node_rows is not None
        return PlainSample(nodes[:num_nodes], ends.view(2, num_edges), e_id, node_counts, edge_counts, (nodes, memory),
                           None, self.max_degree, self.node_rows.take_plain(slot.own_rows, num_nodes))  # fmt: skip


def _join_books(part: GraphPart, topo: PartTopo, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (first nodes of all parts but the first, part of each node) over all types; both are empty for a hash."""
    books = [part.books[kind] for kind in topo.node_types]
    table = torch.zeros(int(topo.type_starts[-1]) if len(books) > 1 else 0, dtype=table_dtype(part.num_parts),
                        device=device)  # fmt: skip
    for kind, book, start in zip(topo.node_types, books, topo.type_starts.tolist(), strict=False):
        own, count = part.tables[kind].ids.to(device), 0
        for first in range(0, book.num_nodes, _NODES_AT_ONCE):
            ids = torch.arange(first, min(first + _NODES_AT_ONCE, book.num_nodes), device=device)
            owners = book.owners(ids)
            count += int((owners == part.part).sum())
            if len(books) > 1:
                table[start + first : start + first + len(ids)] = owners
        if count != own.numel() or not bool((book.owners(own) == part.part).all()):
            raise PartitionError(f"part {part.part} must hold the {count} nodes of {kind!r} that it owns, and holds "
                                 f"{own.numel()} others or not all: it is damaged")  # fmt: skip
    if len(books) > 1:
        return torch.empty(0, dtype=torch.int64, device=device), table
    return books[0].find_arrays(device)
