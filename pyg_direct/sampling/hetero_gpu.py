"""GPU plan for graphs with types, times and weights: all hops of a batch, or of several, as one captured graph.

A kernel lists the work of each hop over all relations (`kernels/sampling/captured_hops.py`), so that the host waits
once a batch. A batch may have the edges among all its nodes instead (`kernels/sampling/captured_subgraph.py`).

Nodes whose trees are not told apart are numbered by a bitmap over all node types, one batch at a time. Local ids stand
in a table over these; if it would be too large, they stand by the ranks of a batch's nodes in the bitmap. Nodes of
trees are numbered by buckets, which are sorted each (`kernels/local_ids/sorted_buckets.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED, THREADS
from pyg_direct.errors import IdError, MemoryLimitError
from pyg_direct.graph.hetero_topo import EdgeType, HeteroTopo, PlacedHetero
from pyg_direct.kernels.batch_counters import (
    BAD_SEED,
    BEFORE_SEEDS,
    EDGES,
    FAR,
    HEADER,
    NEEDED_EDGES,
    NEEDED_ITEMS,
    NO_POSITION,
    NODES,
    NUM_EXCLUDED,
    NUM_INSIDE,
    NUM_SEEDS,
    OWN_TIMES,
    SEEDS_ON_GPU,
    STATE,
)
from pyg_direct.kernels.local_ids import bitmap, new_nodes, relabel, sorted_buckets
from pyg_direct.kernels.local_ids.bitmap import GROUP_WORDS
from pyg_direct.kernels.sampling import captured_hops, captured_subgraph, hetero, weighted_gpu, worklist
from pyg_direct.kernels.sampling.excluded_edges import sort_edges_gpu
from pyg_direct.kernels.sampling.link_ends import TABLE, WAY, find_link_edges_gpu
from pyg_direct.kernels.sampling.worklist import COLUMNS
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.local_ids.relabel_nodes import num_words
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import full_grid, grid_for, prepare_gpu, run_gpu
from pyg_direct.ops.sampling.sample_hetero import PairList, Rows, Rules, write_edges
from pyg_direct.runtime.cuda.graph_capture import fill_words
from pyg_direct.runtime.cuda.launch import OPEN
from pyg_direct.sampling import captured_plan
from pyg_direct.sampling.captured_plan import CapturedPlan, Pending
from pyg_direct.sampling.hetero_sample import GeneralSample, split_outputs
from pyg_direct.sampling.local_ids import fits_table
from pyg_direct.sampling.seeds import (
    EndList,
    Ends,
    LinkInbox,
    Request,
    SeedList,
    list_ends,
    list_seeds,
    list_ways,
    name_seed,
    place_ends,
)

# Nodes up to which every hop reads the whole bitmap: flags would cost more than they save.
_SCAN_NODES = 1 << 27
# Edges up to which a slot is made for the worst case at once; above, it grows with the needs of batches.
_WORST_CASE_EDGES = 1 << 21
_FIRST_EDGES = 64 if SIMULATED else 1 << 19
_MAX_EDGES = 2**31 - 1
# Buckets up to which trees are divided into ranges of nodes, if they have many edges.
_MOST_BUCKETS = 1 << 17
# Words of the bitmap for each thread of a full grid up to which a thread takes one at a time.
_FEW_WORDS = 4
LAST_EDGE = 2**63 - 1


class Scratch(captured_plan.Scratch):
    """Memory by the number of nodes of all types, used by one batch after the other.

    Attributes:
        seen, fresh: Bitmaps, uint32 `[W]`, empty between batches; `[0]` if trees are told apart.
        place_of_id: Positions of nodes, int32 `[N]`; `[0]` with trees, or if it would be too large.
        ranks: In the latter case, number of a batch's nodes in lower words, int32 `[W]`; otherwise `[0]`.
        touched: A flag, uint8, for each group of words of `fresh`; `[0]` for few nodes, all of whose groups are read.
        block_sums: int64, one for each block of a full grid.
    """

    def __init__(self, topology: PlacedHetero, has_bits: bool, has_table: bool) -> None:
        super().__init__()
        device, num_ids = topology.device, int(topology.topo.type_starts[-1]) if has_bits else 0
        words = num_words(num_ids)
        groups = -(-words // GROUP_WORDS) if num_ids > _SCAN_NODES else 0
        self.seen = torch.zeros(words, dtype=torch.int32, device=device).view(torch.uint32)
        self.fresh = torch.zeros(words, dtype=torch.int32, device=device).view(torch.uint32)
        self.touched = torch.zeros(groups, dtype=torch.uint8, device=device)
        self.place_of_id = torch.full((num_ids if has_table else 0,), FAR, dtype=torch.int32, device=device)
        self.ranks = torch.empty(0 if has_table else words, dtype=torch.int32, device=device)
        self.block_sums = torch.empty(full_grid(self.place_of_id), dtype=torch.int64, device=device)
        self._topology: PlacedHetero | None = None

    @classmethod
    def of(cls, topology: PlacedHetero, has_bits: bool, has_table: bool) -> Scratch:
        """Return the scratch of a topology, made once: with bitmaps of its nodes, and a table of them."""
        key = id(topology), has_bits, has_table
        known = _SCRATCH.get(key)
        if known is None:
            known = _SCRATCH[key] = cls(topology, has_bits, has_table)
            # So that its id stays its own as long as the scratch lives.
            known._topology = topology
        return known


_SCRATCH: WeakValueDictionary[tuple[int, bool, bool], Scratch] = WeakValueDictionary()


class Capacity(NamedTuple):
    """Seeds, edges, items of a hop, excluded edges, and trees of a batch that a slot has room for."""

    seeds: int
    edges: int
    items: int
    excluded: int
    trees: int


class Layout(NamedTuple):
    """Identities of a slot: class, tree and node in bits of their own; or ids of the id space, all parts 0.

    Attributes:
        tree_shift: Place of the tree among the bits.
        range_bits: Bits of a node, the highest, that tell buckets of a tree apart.
    """

    tree_shift: int
    tree_bits: int
    range_bits: int

    @property
    def bucket_shift(self) -> int:
        """Place of the bucket among the bits of an identity."""
        return self.tree_shift - self.range_bits

    @property
    def bucket_step(self) -> int:
        """Logarithm of the number of buckets of a class."""
        return self.tree_bits + self.range_bits


class Slot(captured_plan.Slot):
    """Arrays of fixed capacity that hold a batch, or several that are sampled together."""

    def __init__(self, plan: HeteroGpuPlan, capacity: Capacity) -> None:
        device, topo = plan.topology.device, plan.topology.topo
        super().__init__(device)
        on_gpu, layout = device.type == "cuda", plan.lay_out(capacity)
        seeds, edges, items, excluded, _ = capacity
        num_nodes = seeds + (edges if plan.disjoint else min(edges, int(topo.type_starts[-1])))
        classes, entries, hops, rows = plan.num_classes, plan.num_entries, plan.num_hops, plan.num_hops
        is_subgraph = plan.last_fanouts is not None
        if is_subgraph:
            # Its edges have a row of the tables, with or without hops.
            rows = max(rows, 1)

        def reserve(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        self.capacity, self.layout = capacity, layout
        room = (1 + plan.num_times) * seeds
        # Links have a table before them, and fewer words than their ends.
        words = plan.find_seeds() + TABLE * plan.num_batches + room
        self.inbox = torch.zeros(words, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        self.totals = reserve((hops + 2) * classes + (rows + 1) * entries)
        self.outbox = torch.zeros(STATE + self.totals.numel(), dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        self.inbox_words: np.ndarray = self.inbox.numpy()
        self.outbox_words: np.ndarray = self.outbox.numpy()
        self.inbox_keys = self.inbox_words[HEADER : HEADER + plan.num_batches].view(np.uint64)
        # Words of the inbox before the seeds, as they were written last.
        self.header: tuple[Any, ...] | None = None
        self.arrived = reserve(room)
        self.links = LinkInbox(plan.find_seeds(), self.inbox_words, self.inbox, plan.num_batches, self.arrived)
        self.state = torch.zeros(STATE, dtype=torch.int64, device=device)
        self.state[BAD_SEED] = NO_POSITION
        self.begins, self.firsts = reserve((hops + 1) * (classes + 1)), reserve(rows * (entries + 1))
        self.outputs = reserve(classes + 1 + 2 * (entries + 1))
        self.template = upload(plan.list_templates(layout), device)
        self.work = torch.zeros((entries + 1) * COLUMNS, dtype=torch.int64, device=device)
        # Of the last stage of subgraphs, for the nodes of all hops.
        all_entries = (hops + 1) * entries + 1 if is_subgraph else 0
        self.all_work = torch.zeros(all_entries * COLUMNS, dtype=torch.int64, device=device)
        self.seed_times = reserve(plan.num_times * seeds if topo.is_temporal else 0)
        self.excluded = torch.full((excluded,), LAST_EDGE, dtype=torch.int64, device=device)
        self.found_edges = reserve(excluded if plan.num_ways else 0)
        self.nodes, self.trees = reserve(num_nodes), reserve(num_nodes if plan.disjoint else 0)
        self.place_of_rank = reserve(0 if plan.disjoint or plan.has_table else num_nodes, dtype=torch.int32)
        self.starts, self.sizes, self.counts = reserve(3, items).unbind()
        self.offsets = torch.zeros(items + 1, dtype=torch.int64, device=device)
        self.draws, self.sources, self.ids, self.targets = reserve(4, edges).unbind()
        self.repeats = reserve(edges, dtype=torch.uint8)
        self.scores = reserve(edges if plan.is_weighted else 0, dtype=torch.float64)
        # Of the buckets; empty if trees are not told apart.
        num_buckets, listed = (classes << layout.bucket_step, edges) if plan.disjoint else (0, 0)
        self.first_trees = reserve(classes)
        self.bucket_counts = torch.zeros(num_buckets, dtype=torch.int32, device=device)
        self.bucket_starts, self.new_starts = reserve(num_buckets + 1), reserve(hops, num_buckets + 1)
        self.ranks, self.found = reserve(2, listed, dtype=torch.int32).unbind()
        self.keys = reserve(listed, dtype=torch.int32).view(torch.uint32)
        # Counts of nodes by class and of edges by entry, up to each hop.
        node_words, stages = (hops + 2) * classes, plan.num_stages
        self.node_totals = self.outbox_words[STATE : STATE + node_words].reshape(hops + 2, classes)
        edge_words = self.outbox_words[STATE + node_words :][: (stages + 1) * entries]
        self.edge_totals = edge_words.reshape(stages + 1, entries)
        order = self.draws if is_subgraph else self.draws[:0]
        self.export_batch = prepare_gpu(
            captured_hops.export_typed_batch_gpu, self.state, hops, stages, classes, entries, plan.node_starts,
            self.nodes, self.trees, self.begins, self.firsts, self.totals, self.outputs, self.sources, self.targets,
            self.ids, order, int(topo.direction == "out"), self.seed_times, OPEN, OPEN, OPEN, OPEN, OPEN)  # fmt: skip


class HeteroGpuPlan(CapturedPlan):
    """Plan that samples batches of a `PlacedHetero` on one GPU, some at a time as one.

    Args:
        fanouts: Fanouts by hop and relation, int64 `[H, R]`.
        rows: Rows of the topology, with the arrays that the rules need.
        flags: Flags of each relation in work lists, int64 `[R]`.
        repeats: Whether nodes may stand several times among the seeds, which then are the different ones, ascending.
        num_batches: Batches that are sampled together; one unless trees are told apart.
        max_degree: See `GeneralSample`.
        last_fanouts: For batches of the edges among their nodes: edges of a node that are looked at, by relation,
            int64 `[R]`, -1 for all. None for batches of the edges of their hops.
        ways: Relations whose edges of the links are not picked, see `Ends`; `submit` then takes links alone.
    """

    _slot_class: type[Slot] = Slot
    # Whether other plans wait for a batch, also for one without seeds.
    _is_awaited = False
    num_ways = 0

    def __init__(self, topology: PlacedHetero, fanouts: np.ndarray, rules: Rules, rows: Rows, flags: np.ndarray, *,
                 disjoint: bool, repeats: bool, num_batches: int, max_degree: int | None,
                 last_fanouts: np.ndarray | None = None,
                 ways: Sequence[tuple[EdgeType, bool]] = ()) -> None:  # fmt: skip
        assert not repeats if disjoint else num_batches == 1, "batches that share a bitmap, or seeds with trees"
        super().__init__()
        self.topology, self.fanouts, self.rules, self.rows = topology, fanouts, rules, rows
        self.disjoint, self.repeats, self.num_batches, self.max_degree = disjoint, repeats, num_batches, max_degree
        topo, device = topology.topo, topology.device
        self.num_hops, self.last_fanouts = len(fanouts), last_fanouts
        # Rows of the tables of edges that leave with a batch.
        self.num_stages = len(fanouts) if last_fanouts is None else 1
        self.num_times = 2 if rules.window == hetero.BY_SEED else 1
        self.num_classes, self.num_entries = num_batches * len(topo.node_types), num_batches * len(topo.edge_types)
        self.is_weighted = rows.edge_weight.numel() > 0
        self.is_shared = bool((flags & worklist.SHARED).any())
        self.has_table = not disjoint and fits_table(int(topo.type_starts[-1]), device)
        self._flags = flags
        sizes = np.array([topo.num_nodes[kind] for kind in topo.node_types], np.int64)
        self._type_sizes, self._type_starts = upload(np.stack([sizes, topo.type_starts[:-1]]), device).unbind()
        class_starts = np.tile(topo.type_starts[:-1], num_batches)
        self._class_starts = upload(class_starts, device)
        self.node_starts = upload(np.zeros_like(class_starts) if disjoint else class_starts, device)
        self._known_edges = self._known_items = 0
        self.num_ways, words = len(ways), list_ways(topo, ways)
        self._ways = upload(words.reshape(-1), device)
        if self.num_ways:
            # Types of sources and of targets of the links.
            number = topo.edge_types.index(ways[0][0])
            types = int(topo.reached[number]), int(topo.expanded[number])
            self._end_types = types if words[0, WAY - 1] else types[::-1]

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(self.num_hops, "hop")
        yield repr(self.topology)

    def submit(self, requests: Sequence[Request] | Sequence[Ends], keys: Sequence[int],
               excluded: PairList | None = None) -> Pending:  # fmt: skip
        """Enqueue batches on torch's current stream and return at once.

        Args:
            requests: Seeds or links of at most as many batches as are sampled together.
            keys: A key for each.
            excluded: Pairs whose edges are not picked; None for none.
        """
        topo = self.topology.topo
        list_all: Any = list_ends if isinstance(requests[0], Ends) else list_seeds
        listed = list_all(self.topology, requests, self.disjoint, self.num_times)
        missing = self.num_batches - len(requests)
        pending = Pending(self, (listed, excluded, len(requests)), [*keys, *[0] * missing])
        if listed.numel() == 0 and not self._is_awaited:
            node_counts = np.zeros((self.num_hops + 1, len(requests) * len(topo.node_types)), np.int64)
            num_edges = np.zeros((self.num_stages, len(requests) * len(topo.edge_types)), np.int64)
            new = self._class_starts.new_empty
            outputs = new(0), new(2 * num_edges.shape[1]), new(0)
            pending._result = split_outputs(topo, outputs, node_counts, num_edges, len(requests), self.disjoint,
                                            self.max_degree, has_hops=self.last_fanouts is None)  # fmt: skip
            return pending
        return self._submit(pending)

    def lay_out(self, capacity: Capacity) -> Layout:
        """Find the places of the parts of an identity."""
        if not self.disjoint:
            return Layout(0, 0, 0)
        tree_shift = self.topology.topo.id_bits
        tree_bits = (capacity.trees - 1).bit_length()
        # So many that most buckets are sorted whole.
        range_bits = (capacity.edges // (sorted_buckets.TILE << tree_bits)).bit_length()
        range_bits = min(range_bits, max(0, (_MOST_BUCKETS // (self.num_classes << tree_bits)).bit_length() - 1))
        return Layout(tree_shift, tree_bits, min(tree_shift, max(range_bits, tree_shift - sorted_buckets.KEY_BITS)))

    def find_seeds(self) -> int:
        """Place of the first seed in an inbox."""
        return HEADER + self.num_batches + 2 * self.num_classes + 1

    def list_templates(self, layout: Layout) -> np.ndarray:
        """Words of the work lists that do not depend on a batch, int64 `[(A + 1) * COLUMNS]` for each hop and a last
        stage."""
        topo = self.topology.topo
        num_types, num_relations = len(topo.node_types), len(topo.edge_types)
        fanouts = self.fanouts
        if self.last_fanouts is not None:
            fanouts = np.concatenate([fanouts, self.last_fanouts[None]])
        words = np.zeros((len(fanouts), self.num_entries + 1, COLUMNS), np.int64)
        batches, relations = np.divmod(np.arange(self.num_entries), max(1, num_relations))
        expanded, reached = topo.expanded[relations], topo.reached[relations]
        entries = words[:, :-1]
        entries[..., worklist.RELATION], entries[..., worklist.BATCH] = relations, batches
        entries[..., worklist.FANOUT] = fanouts[:, relations]
        entries[..., worklist.ROWS] = topo.row_starts[relations]
        entries[..., worklist.EDGES] = topo.edge_starts[relations]
        entries[..., worklist.FRONT] = batches * num_types + expanded
        entries[..., worklist.FLAGS] = self._flags[relations]
        entries[..., worklist.SOURCE_START] = topo.type_starts[reached]
        if not self.disjoint:
            entries[..., worklist.SOURCE_BASE] = topo.type_starts[reached]
            entries[..., worklist.OWN_START] = topo.type_starts[expanded]
        else:
            of_class = batches * num_types + reached
            entries[..., worklist.SOURCE_BASE] = of_class << (layout.tree_shift + layout.tree_bits)
        return words.reshape(-1)

    def _find_scratch(self) -> Scratch:
        return Scratch.of(self.topology, not self.disjoint, self.has_table)

    def _has_room(self, slot: Slot, pending: Pending) -> bool:
        listed, most_excluded = pending.seeds[0], self._count_excluded(pending)
        return bool(listed.numel() <= slot.capacity.seeds and most_excluded <= slot.capacity.excluded
                    and self._count_trees(listed) <= slot.capacity.trees)  # fmt: skip

    def _count_excluded(self, pending: Pending) -> int:
        """Count the pairs whose edges are excluded."""
        listed, excluded, _ = pending.seeds
        if self.num_ways:
            return self.num_ways * sum([ends.num_links for ends in listed.requests])
        return 0 if excluded is None else excluded.keys.numel()

    def _count_trees(self, listed: SeedList) -> int:
        """Count the most trees of a batch; 1 if they are not told apart."""
        return listed.most if self.disjoint else 1

    def _find_capacity(self, before: Slot | None, pending: Pending) -> Capacity:
        listed, _, num_batches = pending.seeds
        # Most pairs have an edge or none; if edges are parallel, a batch shows how many more.
        num_seeds, num_excluded = listed.numel(), self._count_excluded(pending)
        num_trees = self._count_trees(listed)
        if before is not None:
            num_trees = max(num_trees, before.capacity.trees)
            num_seeds = max(num_seeds, before.capacity.seeds)
            num_excluded = max(num_excluded, before.capacity.excluded)
        # Batches differ a little in the number of excluded edges.
        num_excluded = 1 << num_excluded.bit_length() if num_excluded else 0
        counts = np.array(listed.counts, np.int64).reshape(num_batches, -1).sum(0)
        worst = None
        if self.last_fanouts is None and (before is None or num_seeds == listed.numel()):
            worst = _find_worst_case(self.topology.topo, self.fanouts, counts, None if self.disjoint else num_batches)
        if worst is not None and worst[0] <= _WORST_CASE_EDGES:
            return Capacity(num_seeds, max(worst[0], self._known_edges, 1), max(worst[1], self._known_items, 1),
                            num_excluded, num_trees)  # fmt: skip
        edges = max(self._known_edges, _FIRST_EDGES)
        items = max(self._known_items, edges, int(counts[self.topology.topo.expanded].sum()))
        return Capacity(num_seeds, edges, items, num_excluded, num_trees)

    def _count_slot_bytes(self, capacity: Capacity) -> int:
        seeds, edges, items, *_ = capacity
        # Nodes, trees and the arrays of buckets; as many nodes as edges.
        own_bytes = 28 if self.disjoint else 8
        bucket_bytes = (12 + 8 * self.num_hops) * (self.num_classes << self.lay_out(capacity).bucket_step)
        return edges * (33 + own_bytes + 8 * self.is_weighted) + 32 * items + 64 * seeds + bucket_bytes

    def _allocate_slot(self, capacity: Capacity) -> Slot:
        if capacity.edges > _MAX_EDGES:
            raise MemoryLimitError(
                f"a batch must have fewer than {_MAX_EDGES} edges, and {capacity.seeds} seeds with these fanouts need "
                f"{capacity.edges}; use fewer seeds or smaller fanouts"
            )
        slot = self._slot_class(self, capacity)
        self._known_edges, self._known_items = (max(known, new) for known, new in (
            (self._known_edges, capacity.edges), (self._known_items, capacity.items)))  # fmt: skip
        return slot

    def _write_inbox(self, slot: Slot, pending: Pending) -> None:
        listed, excluded, _ = pending.seeds
        words, count, seeds = slot.inbox_words, listed.numel(), self.find_seeds()
        is_links = isinstance(listed, EndList)
        is_there = is_links or listed.ids.is_cuda
        slot.inbox_keys[:] = pending.key
        header = is_there, listed.times is None, listed.counts, listed.first_trees
        # Most batches have as many seeds as the batch before.
        if header != slot.header:
            slot.header = header
            words[NUM_SEEDS], words[SEEDS_ON_GPU], words[OWN_TIMES] = count, is_there, listed.times is None
            missing = [0] * (self.num_classes - len(listed.counts))
            # Classes of batches that are missing begin at the end.
            words[HEADER + self.num_batches : seeds] = [*accumulate([*listed.counts, *missing], initial=0),
                                                        *listed.first_trees, *missing]  # fmt: skip
        if is_links:
            slot.links.draw(listed)
        elif is_there:
            slot.arrived[:count].copy_(listed.ids)
            if listed.times is not None:
                slot.arrived[count : (1 + self.num_times) * count].copy_(listed.times.view(-1))
        else:
            words[seeds : seeds + count] = listed.ids.numpy()
            if listed.times is not None:
                words[seeds + count : seeds + (1 + self.num_times) * count] = listed.times.numpy().reshape(-1)
        if slot.excluded.numel() and not self.num_ways:
            self._write_excluded(slot, excluded)

    def _write_excluded(self, slot: Slot, excluded: Any) -> None:
        """Write the edges that a batch leaves out to its slot."""
        if excluded is None:
            slot.excluded.fill_(LAST_EDGE)
        else:
            write_edges(self.rows, excluded, slot.state, NUM_EXCLUDED, slot.excluded)

    def _enqueue(self, slot: Slot, stream: int) -> None:
        topo, rows, scratch, layout = self.topology.topo, self.rows, self._scratch, slot.layout
        hops, batches, types = self.num_hops, self.num_batches, len(topo.node_types)
        load_grid = grid_for(slot.capacity.seeds, slot.state)
        # Starts of the buckets of each hop among its nodes; empty without buckets.
        starts_of = [slot.bucket_starts[:0] if not self.disjoint or hop < 0 else slot.new_starts[hop]
                     for hop in range(-1, hops)]  # fmt: skip

        if self.num_ways:
            room = slot.capacity.excluded
            run_gpu(find_link_edges_gpu, max(1, min(scratch.block_sums.numel(), room)), slot.state, slot.inbox,
                    self.find_seeds(), batches, types, *self._end_types, slot.arrived, self._ways, rows.indptr,
                    rows.indices, slot.found_edges, stream=stream)  # fmt: skip
            run_gpu(sort_edges_gpu, grid_for(room, slot.state), slot.state, NUM_EXCLUDED, slot.found_edges,
                    slot.excluded, stream=stream)  # fmt: skip
        run_gpu(captured_hops.load_typed_seeds_gpu, load_grid, slot.state, slot.inbox, slot.arrived, rows.node_time,
                batches, types, self.num_times, self._type_sizes, self._type_starts, int(self.repeats), scratch.fresh,
                scratch.touched, scratch.seen, scratch.place_of_id, slot.nodes, slot.trees, slot.seed_times,
                stream=stream)  # fmt: skip
        if self.repeats:
            self._number_by_table(BEFORE_SEEDS, scratch.seen, slot.state, slot.nodes, stream)
        elif self.has_table:
            run_gpu(captured_hops.claim_seeds_gpu, load_grid, slot.state, slot.nodes, scratch.place_of_id,
                    stream=stream)  # fmt: skip
        for hop in range(hops):
            run_gpu(captured_hops.list_work_gpu, 1, slot.state, slot.inbox, hop, hops, batches, types,
                    slot.capacity.items, int(self.repeats), slot.nodes, self._class_starts, starts_of[hop],
                    layout.bucket_step, slot.template, slot.work, slot.offsets, slot.begins, slot.firsts, slot.totals,
                    slot.first_trees, stream=stream)  # fmt: skip
            self._pick(slot, slot.work, hop, hop, stream)
            self._number(slot, hop, stream)
        node_grid = grid_for(slot.nodes.numel(), slot.state)
        if self.last_fanouts is not None:
            run_gpu(captured_subgraph.list_all_nodes_gpu, 1, slot.state, slot.inbox, hops, batches, types,
                    slot.capacity.items, int(self.repeats), slot.nodes, self._class_starts, starts_of[hops],
                    layout.bucket_step, slot.template[hops * slot.work.numel() :], slot.all_work, slot.begins,
                    slot.totals, slot.first_trees, stream=stream)  # fmt: skip
            self._pick(slot, slot.all_work, hops, 0, stream)
            self._keep_inside(slot, node_grid, stream)
            return
        run_gpu(captured_hops.close_batch_gpu, 1, slot.state, slot.inbox, hops, batches, types, int(self.repeats),
                slot.nodes, self._class_starts, starts_of[hops], layout.bucket_step, slot.work, slot.offsets,
                slot.begins, slot.firsts, slot.totals, slot.outputs, slot.outbox, stream=stream)  # fmt: skip
        if self.disjoint:
            return
        # Through a table, sources are found without the bits of nodes.
        cleared = scratch.seen if self.has_table else scratch.seen[:0]
        found = self._settle_places(slot, node_grid, cleared, stream)
        run_gpu(captured_hops.localize_ids_gpu, grid_for(slot.capacity.edges, slot.state), slot.state, hops,
                slot.sources, *found, stream=stream)  # fmt: skip
        if not self.has_table:
            run_gpu(captured_hops.forget_nodes_gpu, node_grid, slot.state, hops, slot.nodes, scratch.seen,
                    stream=stream)  # fmt: skip

    def _pick(self, slot: Slot, work: Tensor, hop: int, stage: int, stream: int) -> None:
        """Pick the edges of a work list under the key of `hop`, and write them after the edges of earlier stages.

        Sources of hops are marked for `_number`.
        """
        rows, scratch, layout = self.rows, self._scratch, slot.layout
        full = scratch.block_sums.numel()
        item_grid = max(1, min(full, -(-slot.capacity.items // THREADS)))
        replace, last, strict = int(self.rules.replace), int(self.rules.last), int(self.rules.strict)
        run_gpu(hetero.count_items_gpu, item_grid, work, rows.indptr, rows.indices, rows.node_time, rows.edge_time,
                rows.edge_weight, slot.nodes, slot.trees, slot.seed_times, slot.excluded, replace, last, strict,
                self.rules.window, slot.starts, slot.sizes, slot.counts, scratch.block_sums,
                stream=stream)  # fmt: skip
        run_gpu(captured_hops.place_items_gpu, item_grid, slot.state, stage, slot.capacity.edges, work, slot.counts,
                scratch.block_sums, slot.offsets, stream=stream)  # fmt: skip
        if self.is_weighted and hop < self.num_hops:
            run_gpu(weighted_gpu.pick_weighted_gpu, full, hop, replace, work, rows.edge_weight, rows.weight_before,
                    slot.excluded, slot.nodes, slot.trees, slot.starts, slot.sizes, slot.offsets, slot.draws,
                    stream=stream)  # fmt: skip
            if not replace:
                run_gpu(weighted_gpu.pick_long_rows_gpu, full, hop, work, rows.edge_weight, slot.excluded, slot.nodes,
                        slot.trees, slot.starts, slot.sizes, slot.offsets, slot.scores, slot.draws,
                        stream=stream)  # fmt: skip
        if self.is_shared and hop < self.num_hops:
            run_gpu(hetero.pick_labor_items_gpu, full, hop, work, rows.indices, slot.excluded, slot.starts,
                    slot.sizes, slot.offsets, slot.draws, stream=stream)  # fmt: skip
        run_gpu(hetero.pick_items_gpu, full, hop, replace, layout.tree_shift, work, rows.indices, rows.edge_ids,
                slot.excluded, slot.nodes, slot.trees, slot.starts, slot.sizes, slot.offsets, slot.draws, slot.repeats,
                slot.sources, slot.ids, slot.targets, *self._list_marks(slot, hop), stream=stream)  # fmt: skip

    def _list_marks(self, slot: Slot, hop: int) -> tuple[Any, ...]:
        """List the places where a pick marks the sources of `hop`; empty behind the last hop."""
        scratch, size = self._scratch, None if hop < self.num_hops else 0
        return (scratch.fresh[:size], scratch.touched[:size], slot.layout.bucket_shift, slot.bucket_counts[:size],
                slot.ranks[:size])  # fmt: skip

    def _number(self, slot: Slot, hop: int, stream: int) -> None:
        """Turn the new sources of a hop into the nodes of the next hop."""
        if self.disjoint:
            self._number_by_buckets(slot, hop, stream)
        else:
            self._number_by_table(hop, self._scratch.seen, slot.state, slot.nodes, stream)

    def _keep_inside(self, slot: Slot, node_grid: int, stream: int) -> None:
        """Keep the edges of the last stage whose sources are nodes of the batch, and close the batch."""
        scratch, layout, hops = self._scratch, slot.layout, self.num_hops
        found = scratch.seen, scratch.ranks, scratch.place_of_id
        if not self.disjoint:
            found = self._settle_places(slot, node_grid, scratch.seen[:0], stream)
        parts = self.num_classes, layout.range_bits, layout.tree_bits, layout.tree_shift, layout.bucket_shift
        edge_grid = grid_for(slot.capacity.edges, slot.state)
        run_gpu(captured_subgraph.localize_inside_gpu, edge_grid, slot.state, hops, *parts, slot.bucket_counts.numel(),
                *found, slot.first_trees, slot.new_starts.view(-1), slot.begins, slot.totals, slot.nodes, slot.keys,
                slot.sources, scratch.block_sums, stream=stream)  # fmt: skip
        run_gpu(captured_subgraph.order_inside_gpu, edge_grid, slot.state, slot.sources, scratch.block_sums, slot.draws,
                stream=stream)  # fmt: skip
        run_gpu(captured_subgraph.close_subgraph_gpu, 1, slot.state, hops, self.num_classes, slot.all_work,
                slot.offsets, slot.draws, slot.firsts, slot.totals, slot.outputs, slot.outbox,
                stream=stream)  # fmt: skip
        if not self.disjoint:
            run_gpu(captured_hops.forget_nodes_gpu, node_grid, slot.state, hops, slot.nodes, scratch.seen,
                    stream=stream)  # fmt: skip

    def _settle_places(self, slot: Slot, node_grid: int, cleared: Tensor, stream: int
                       ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Write the local ids of all nodes; return (bits of nodes, ranks of words, local ids) to find them by."""
        s, hops, places = self._scratch, self.num_hops, self._scratch.place_of_id
        if not self.has_table:
            places = slot.place_of_rank
            grid = max(1, min(s.block_sums.numel(), -(-s.seen.numel() // THREADS)))
            fill_words(places, FAR, stream)
            run_gpu(bitmap.sum_words_gpu, grid, s.seen, s.block_sums, stream=stream)
            run_gpu(bitmap.rank_words_gpu, grid, s.seen, s.block_sums, s.ranks, stream=stream)
            run_gpu(relabel.locate_nodes_gpu, node_grid, slot.state, hops, slot.nodes, s.seen, s.ranks, places,
                    stream=stream)  # fmt: skip
        run_gpu(captured_hops.settle_places_gpu, node_grid, slot.state, hops, self.num_classes, slot.nodes, slot.begins,
                slot.totals, s.seen, s.ranks, places, cleared, stream=stream)  # fmt: skip
        return s.seen, s.ranks, places

    def _number_by_table(self, hop: int, seen: Tensor, state: Tensor, nodes: Tensor, stream: int) -> None:
        """Append the ids marked fresh that were not seen to `nodes`, as nodes of the hop after `hop` of `state`."""
        s = self._scratch
        full, words = s.block_sums.numel(), seen.numel()
        grid, quads = max(1, min(full, -(-words // THREADS))), int(words > _FEW_WORDS * THREADS * full)
        run_gpu(new_nodes.count_fresh_gpu, grid, s.fresh, seen, s.touched, s.block_sums, stream=stream)
        run_gpu(new_nodes.emit_fresh_gpu, grid, state, hop, quads, s.fresh, seen, s.touched, s.block_sums,
                s.place_of_id, nodes, stream=stream)  # fmt: skip

    def _number_by_buckets(self, slot: Slot, hop: int, stream: int) -> None:
        """As `_number_by_table`, of the identities of this hop, whose sources become local ids at once."""
        layout, grid = slot.layout, grid_for(slot.capacity.edges, slot.state)
        parts = self.num_classes, layout.range_bits, layout.tree_bits, layout.tree_shift, layout.bucket_shift
        counts, starts, new_starts = slot.bucket_counts, slot.bucket_starts, slot.new_starts
        # A block for each, whose sizes differ much.
        bucket_grid = min(counts.numel(), 3 if SIMULATED else _MOST_BUCKETS)
        self._scan_buckets(slot, hop, 0, starts, stream)
        run_gpu(sorted_buckets.fill_buckets_gpu, grid, slot.state, hop, layout.bucket_shift, slot.sources, slot.ranks,
                starts, slot.keys, stream=stream)  # fmt: skip
        run_gpu(sorted_buckets.sort_buckets_gpu, bucket_grid, slot.state, hop, *parts, slot.first_trees,
                new_starts.view(-1), slot.begins, slot.totals, slot.nodes, starts, slot.keys, slot.found, counts,
                stream=stream)  # fmt: skip
        self._scan_buckets(slot, hop, 1, new_starts[hop], stream)
        run_gpu(sorted_buckets.settle_sources_gpu, grid, slot.state, hop, *parts, slot.sources, slot.ranks,
                slot.found, new_starts[hop], slot.totals, slot.nodes, slot.trees, stream=stream)  # fmt: skip

    def _scan_buckets(self, slot: Slot, hop: int, is_new: int, starts: Tensor, stream: int) -> None:
        """Turn the counts of the buckets into their starts."""
        counts, sums = slot.bucket_counts, self._scratch.block_sums
        grid = max(1, min(sums.numel(), -(-counts.numel() // THREADS)))
        run_gpu(sorted_buckets.sum_buckets_gpu, grid, counts, sums, stream=stream)
        run_gpu(sorted_buckets.place_buckets_gpu, grid, slot.state, hop, is_new, sums, counts, starts, stream=stream)

    def _find_larger(self, slot: Slot, pending: Pending) -> Capacity | None:
        words = slot.outbox_words
        if words[BAD_SEED] != NO_POSITION:
            raise IdError(name_seed(self.topology.topo, pending.seeds[0], int(words[BAD_SEED])))
        return self._grow(slot)

    def _grow(self, slot: Slot) -> Capacity | None:
        """Find the capacity that the batch of a slot needs; None if the slot has it."""
        words = slot.outbox_words
        needed_edges, needed_items = int(words[NEEDED_EDGES]), int(words[NEEDED_ITEMS])
        num_excluded = max(slot.capacity.excluded, int(words[NUM_EXCLUDED]))
        if needed_edges == needed_items == 0 and num_excluded == slot.capacity.excluded:
            return None
        edges, items = slot.capacity.edges, slot.capacity.items
        edges = max(needed_edges + needed_edges // 4, 2 * edges) if needed_edges else edges
        items = max(needed_items + needed_items // 4, 2 * items) if needed_items else items
        return slot.capacity._replace(edges=edges, items=items, excluded=num_excluded)

    def _export(self, slot: Slot, pending: Pending) -> list[GeneralSample]:
        hops, words, is_subgraph = self.num_hops, slot.outbox_words, self.last_fanouts is not None
        # The words are written anew before these counts are read: differences are copies.
        node_totals, edge_totals = slot.node_totals, slot.edge_totals
        num_nodes, num_edges = int(words[NODES + hops]), int(words[NUM_INSIDE if is_subgraph else EDGES + hops])
        # Relations without edges have room for one.
        new, num_empty = slot.arrived.new_empty, edge_totals[-1].tolist().count(0)
        listed, _, num_asked = pending.seeds
        width, size = (2 if self.disjoint else 1), len(self.topology.topo.node_types)
        more = [2 * self.num_classes + 1, 2 * self.num_entries + 1]
        if isinstance(listed, SeedList) and listed.times is not None:
            # Times of the seeds of each batch.
            more += [self.num_times * sum(listed.counts[place : place + size])
                     for place in range(0, len(listed.counts), size)]  # fmt: skip
        outputs = new(width * num_nodes + sum(more)), new(2 * (num_edges + num_empty)), new(num_edges)
        slot.export_batch(grid_for(max(num_nodes, num_edges), slot.state), (*outputs, num_nodes, sum(more[2:])))
        samples = split_outputs(self.topology.topo, outputs, node_totals[1:] - node_totals[:-1],
                                edge_totals[1:] - edge_totals[:-1], self.num_batches, self.disjoint, self.max_degree,
                                has_hops=not is_subgraph, words=more)  # fmt: skip
        if isinstance(listed, EndList):
            trees = outputs[0][num_nodes : 2 * num_nodes] if self.disjoint else outputs[0][:0]
            self._place_links(slot, listed, samples, trees)
        return samples[:num_asked]

    def _place_links(self, slot: Slot, listed: EndList, samples: Sequence[GeneralSample], trees: Tensor) -> None:
        """Note the local ids of the ends of links in their samples; trees become numbers of links."""
        parts: Sequence[Tensor] = [trees]
        if self.num_batches > 1:
            parts = trees.split([sum(own.sizes.values()) for own in samples])
        failures = slot.links.table[:, 2:].tolist()
        starts = self.topology.topo.type_starts
        for number, sample in zip(range(len(listed.requests)), samples, strict=False):
            sample.ends = place_ends(listed, number, sample, slot.nodes, parts[number], slot.arrived, starts,
                                     failures[number])  # fmt: skip


def _find_worst_case(topo: HeteroTopo, fanouts: np.ndarray, counts: np.ndarray, copies: int | None
                     ) -> tuple[int, int] | None:  # fmt: skip
    """Upper bounds of the edges of a batch, and of the items of a hop; None if a fanout takes all neighbors.

    Args:
        fanouts: Fanouts by hop and relation, int64 `[H, R]`.
        counts: Seeds of each type, of all batches together, int64 `[T]`.
        copies: How often a node may be met as a new one; None for as often as there are edges.
    """
    frontier, edges, items = counts.tolist(), 0, 0
    sizes = [topo.num_nodes[kind] for kind in topo.node_types]
    for of_hop in fanouts.tolist():
        if any(fanout < 0 for fanout in of_hop):
            return None
        reached, of_this = [0] * len(sizes), 0
        for relation, fanout in enumerate(of_hop):
            count = frontier[topo.expanded[relation]]
            of_this += count if fanout else 0
            edges += count * fanout
            reached[topo.reached[relation]] += count * fanout
        items = max(items, of_this)
        if copies is None:
            frontier = reached
        else:
            frontier = [min(own, copies * size) for own, size in zip(reached, sizes, strict=True)]
    return edges, items
