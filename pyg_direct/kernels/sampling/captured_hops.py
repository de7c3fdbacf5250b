"""Hops over a work list that a GPU makes itself: every count of a batch stays on the device until the batch is over.

A batch has classes of nodes: its node types, repeated for each of several batches that are sampled together. The
entries of its work list are its relations, repeated in the same way. Nodes stand in `nodes` hop after hop, class after
class within a hop; the position of a node there is its number in the batch. Edges stand hop after hop in the order of
the items.

`begins`, int64 `[(H + 1) * (C + 1)]`, is the first node of each class in each hop. `firsts`, int64 `[H * (A + 1)]`, is
the first edge of each entry in each hop. `totals`, int64 `[(H + 2) * C + (H + 1) * A]`, has the nodes of each class
before each hop, and then the edges of each entry before each hop. `outputs`, int64 `[(C + 1) + 2 * (A + 1)]`, has the
first position of each class's nodes, and of each entry's edge ids and pairs, in the exported batch.

Without disjoint trees, sources are ids of the id space until the batch is over. `place_of_id` has the position of each
node; after the last hop it has the local id, as -1 - id. If the id space is too large for such a table, `places` has
the local ids instead. It is indexed by the rank of a node among all nodes of the batch (`kernels/local_ids/bitmap.py`).
With disjoint trees sources are local ids already, because buckets of each tree have numbered them
(`kernels/local_ids/sorted_buckets.py`).
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cuda, gpu_kernel
from pyg_direct.kernels.batch_counters import (
    BAD_SEED,
    EDGES,
    FAR,
    HEADER,
    NEEDED_EDGES,
    NEEDED_ITEMS,
    NO_POSITION,
    NODES,
    NUM_EXCLUDED,
    NUM_SEEDS,
    OWN_TIMES,
    SEEDS_ON_GPU,
    STATE,
)
from pyg_direct.kernels.binary_search import first_not_below, last_at_most
from pyg_direct.kernels.local_ids.bitmap import GROUP_WORDS, WORD, bit_of, rank_of
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block, sum_before
from pyg_direct.kernels.sampling import worklist
from pyg_direct.kernels.sampling.worklist import COLUMNS, count_all_items

# Columns of a template: as in a work list, except that FRONT holds the number of the class that is expanded.
_FIRST, _FANOUT, _FRONT, _LOCAL = worklist.FIRST, worklist.FANOUT, worklist.FRONT, worklist.LOCAL
_KEY, _BATCH, _FIRST_TREE = worklist.KEY, worklist.BATCH, worklist.FIRST_TREE


@gpu_kernel("i8[] i8[] i8[] i8[] i8 i8 i8 i8[] i8[] i8 u4[] u1[] u4[] i4[] i8[] i8[] i8[]")
def load_typed_seeds_gpu(state, inbox, arrived, node_time, num_batches, num_types, num_times, type_sizes, type_starts,
                         repeats, fresh, touched, seen, place_of_id, nodes, trees, seed_times):  # fmt: skip
    """Seeds become the first nodes; a seed that is no node of its type is recorded and read as node 0.

    The header of the inbox, which may be page-locked memory of the host, is followed by a key for each batch. Then come
    the first seed of each class and the end of the last, and the first tree of each class within its batch. The seeds
    follow. Then come `num_times` times of each tree, tree after tree, unless the seeds have their own times. Seeds and
    times stand in `arrived` instead if the inbox says so. If seeds may repeat, they are only marked in `fresh`, whose
    nodes become the first ones.
    """
    count, num_classes = inbox[NUM_SEEDS], num_batches * num_types
    begins = HEADER + num_batches
    first_trees = begins + num_classes + 1
    given = first_trees + num_classes
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if i == 0:
        state[NUM_SEEDS] = count
        state[NODES] = count
        state[EDGES] = 0
    while i < count:
        kind = last_at_most(inbox, begins, begins + num_classes, i) - begins
        node = arrived[i] if inbox[SEEDS_ON_GPU] != 0 else inbox[given + i]
        node_type = kind % num_types
        if node < 0 or node >= type_sizes[node_type]:
            cuda.atomic.min(state, BAD_SEED, i)
            node = np.int64(0)
        tree = inbox[first_trees + kind] + i - inbox[begins + kind]
        if seed_times.shape[0] > 0:
            if inbox[OWN_TIMES] != 0:
                own = inbox[begins + kind - node_type] + tree
                seed_times[own] = node_time[type_starts[node_type] + node]
            else:
                for place in range(num_times * i, num_times * (i + 1)):
                    if inbox[SEEDS_ON_GPU] != 0:
                        seed_times[place] = arrived[count + place]
                    else:
                        seed_times[place] = inbox[given + count + place]
        if trees.shape[0] > 0:
            trees[i] = tree
        else:
            node += type_starts[node_type]
        if repeats != 0:
            cuda.atomic.or_(fresh, node >> 5, bit_of(node))
            if touched.shape[0] > 0:
                touched[node // (GROUP_WORDS * WORD)] = 1
        else:
            nodes[i] = node
            if trees.shape[0] == 0:
                cuda.atomic.or_(seen, node >> 5, bit_of(node))
            if place_of_id.shape[0] > 0:
                # The first of repeated seeds wins: `claim_seeds_gpu` takes the minimum.
                place_of_id[node] = FAR
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] i4[]")
def claim_seeds_gpu(state, nodes, place_of_id):
    """Of repeated seeds the first gives the position."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < state[NODES]:
        cuda.atomic.min(place_of_id, nodes[i], np.int32(i))
        i += np.int64(cuda.gridDim.x) * THREADS


@body
def close_entries(hop, num_hops, num_classes, work, offsets, firsts, totals):
    """Tables of the edges of `hop`, which are complete; by one block, whose threads synchronize afterwards."""
    entries = np.int64(work.shape[0] // COLUMNS - 1)
    before = (num_hops + 2) * num_classes + hop * entries
    a = np.int64(cuda.threadIdx.x)
    while a <= entries:
        first = offsets[work[a * COLUMNS + _FIRST]]
        firsts[hop * (entries + 1) + a] = first
        if a < entries:
            count = offsets[work[(a + 1) * COLUMNS + _FIRST]] - first
            if hop == 0:
                totals[before + a] = 0
            totals[before + entries + a] = totals[before + a] + count
        a += THREADS


@body
def close_nodes(state, hop, num_classes, inbox, num_batches, repeats, nodes, class_starts, bucket_starts, bucket_step,
                begins, totals):  # fmt: skip
    """Tables of the nodes of `hop`, which are complete; by one block."""
    row = hop * (num_classes + 1)
    begin = np.int64(0)
    if hop > 0:
        begin = state[NODES + hop - 1]
    c = np.int64(cuda.threadIdx.x)
    while c <= num_classes:
        if hop == 0 and repeats == 0:
            begins[row + c] = inbox[HEADER + num_batches + c]
        elif c == num_classes:
            begins[row + c] = state[NODES + hop]
        elif bucket_starts.shape[0] > 0:
            begins[row + c] = begin + bucket_starts[c << bucket_step]
        else:
            begins[row + c] = first_not_below(nodes, begin, state[NODES + hop], class_starts[c])
        c += THREADS
    cuda.syncthreads()
    c = np.int64(cuda.threadIdx.x)
    while c < num_classes:
        if hop == 0:
            totals[c] = 0
        totals[(hop + 1) * num_classes + c] = totals[hop * num_classes + c] + begins[row + c + 1] - begins[row + c]
        c += THREADS
    cuda.syncthreads()


@body
def list_entries(state, inbox, hop, num_parts, num_batches, num_types, capacity, template, own, work, begins, totals,
                 shared):  # fmt: skip
    """Write the entries of a work list and the running sum of their items; by one block.

    Each entry of the template stands for the nodes of `num_parts` hops from `hop` on, an entry of the list for each. If
    there are more items than the capacity, their number is recorded and the list has none.
    """
    tid, num_classes = np.int64(cuda.threadIdx.x), num_batches * num_types
    entries = np.int64(work.shape[0] // COLUMNS - 1)
    needed = np.int64(0)
    first = np.int64(0)
    while first <= entries:
        a = first + tid
        count = np.int64(0)
        if a < entries:
            at, source, part = a * COLUMNS, own + (a // num_parts) * COLUMNS, hop + a % num_parts
            for column in range(COLUMNS):
                work[at + column] = template[source + column]
            kind, batch, row = template[source + _FRONT], template[source + _BATCH], part * (num_classes + 1)
            begin = begins[row + kind]
            if template[source + _FANOUT] != 0:
                count = begins[row + kind + 1] - begin
            work[at + _FRONT], work[at + _LOCAL] = begin, totals[part * num_classes + kind]
            work[at + _KEY] = inbox[HEADER + batch]
            work[at + _FIRST_TREE] = begins[batch * num_types]
        before, total = scan_block(count, shared)
        if a <= entries:
            work[a * COLUMNS + _FIRST] = needed + before
        needed += total
        first += THREADS
    cuda.syncthreads()
    if needed > capacity:
        a = tid
        while a <= entries:
            work[a * COLUMNS + _FIRST] = 0
            a += THREADS
        if tid == 0:
            state[NEEDED_ITEMS] = max(state[NEEDED_ITEMS], needed)


@gpu_kernel("i8[] i8[] i8 i8 i8 i8 i8 i8 i8[] i8[] i8[] i8 i8[] i8[] i8[] i8[] i8[] i8[] i8[]")
def list_work_gpu(state, inbox, hop, num_hops, num_batches, num_types, capacity, repeats, nodes, class_starts,
                  bucket_starts, bucket_step, template, work, offsets, begins, firsts, totals,
                  first_trees):  # fmt: skip
    """Close the tables of the hop before, and list the work of `hop`; one block.

    `template` holds the known columns of the entries of each hop, int64 `[H * (A + 1) * COLUMNS]`. If there are more
    items than the capacity, this is recorded and the hop has none.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    tid, num_classes = np.int64(cuda.threadIdx.x), num_batches * num_types
    if hop > 0:
        close_entries(hop - 1, num_hops, num_classes, work, offsets, firsts, totals)
    cuda.syncthreads()
    close_nodes(state, hop, num_classes, inbox, num_batches, repeats, nodes, class_starts, bucket_starts, bucket_step,
                begins, totals)  # fmt: skip
    if hop == 0:
        c = tid
        while c < num_classes:
            first_trees[c] = inbox[HEADER + num_batches + num_classes + 1 + c]
            c += THREADS
    list_entries(state, inbox, hop, 1, num_batches, num_types, capacity, template, hop * work.shape[0], work, begins,
                 totals, shared)  # fmt: skip


@gpu_kernel("i8[] i8 i8 i8[] i8[] i8[] i8[]")
def place_items_gpu(state, hop, capacity, work, counts, block_sums, offsets):
    """Running sum of the picks of items, which is the first edge of each; by a grid equal to the counting grid.

    If edges do not fit the capacity, this is recorded, and the hop has none.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    num_items = count_all_items(work)
    before, total = sum_before(block_sums, shared)
    begin = state[EDGES + hop]
    is_full = begin + total > capacity
    running = begin + before
    own_begin, own_end = own_range(num_items)
    tile = own_begin
    while tile < own_end:
        item = tile + cuda.threadIdx.x
        count = np.int64(0)
        if item < own_end and not is_full:
            count = counts[item]
        ahead, of_tile = scan_block(count, shared)
        if item < own_end:
            offsets[item] = begin if is_full else running + ahead
        running += of_tile
        tile += THREADS
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        offsets[num_items] = begin if is_full else begin + total
        state[EDGES + hop + 1] = begin if is_full else begin + total
        if is_full:
            state[NEEDED_EDGES] = max(state[NEEDED_EDGES], begin + total)


@gpu_kernel("i8[] i8[] i8 i8 i8 i8 i8[] i8[] i8[] i8 i8[] i8[] i8[] i8[] i8[] i8[] i8[]")
def close_batch_gpu(state, inbox, num_hops, num_batches, num_types, repeats, nodes, class_starts, bucket_starts,
                    bucket_step, work, offsets, begins, firsts, totals, outputs, outbox):  # fmt: skip
    """The tables of the last hop, the positions of all outputs, and the sizes for the host; one block."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    num_classes, entries = num_batches * num_types, np.int64(work.shape[0] // COLUMNS - 1)
    tid = np.int64(cuda.threadIdx.x)
    if num_hops > 0:
        close_entries(num_hops - 1, num_hops, num_classes, work, offsets, firsts, totals)
    else:
        a = tid
        while a < entries:
            totals[2 * num_classes + a] = 0
            a += THREADS
    cuda.syncthreads()
    close_nodes(state, num_hops, num_classes, inbox, num_batches, repeats, nodes, class_starts, bucket_starts,
                bucket_step, begins, totals)  # fmt: skip
    place_all_outputs(totals, num_hops, num_hops, num_classes, entries, outputs, shared)
    leave_sizes(state, totals, outbox)


@body
def leave_sizes(state, totals, outbox):
    """Copy the sizes of a batch to the outbox, and reset them for the next batch; by one block."""
    w = np.int64(cuda.threadIdx.x)
    while w < STATE:
        outbox[w] = state[w]
        w += THREADS
    w = np.int64(cuda.threadIdx.x)
    while w < totals.shape[0]:
        outbox[STATE + w] = totals[w]
        w += THREADS
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        state[BAD_SEED] = NO_POSITION
        state[NEEDED_EDGES] = 0
        state[NEEDED_ITEMS] = 0
        state[NUM_EXCLUDED] = 0


@body
def place_all_outputs(totals, num_hops, num_stages, num_classes, entries, outputs, shared):
    """First position of each class's nodes, and of each entry's edge ids and pairs; by one block.

    Edges have as many rows of totals as there are stages.
    """
    place_outputs(totals, (num_hops + 1) * num_classes, num_classes, 0, outputs, 0, shared)
    edges = (num_hops + 2) * num_classes + num_stages * entries
    place_outputs(totals, edges, entries, 0, outputs, num_classes + 1, shared)
    place_outputs(totals, edges, entries, 1, outputs, num_classes + entries + 2, shared)


@body
def place_outputs(sizes, begin, count, is_pair, outputs, at, shared):
    """outputs[at : at + count + 1]: first position of each output of the given sizes, and the end of the last.

    A pair has two numbers for each edge, and as many without edges as with one.
    """
    running = np.int64(0)
    first = np.int64(0)
    while first <= count:
        i = first + cuda.threadIdx.x
        size = np.int64(0)
        if i < count:
            size = sizes[begin + i]
            if is_pair:
                size = 2 * max(size, np.int64(1))
        before, total = scan_block(size, shared)
        if i <= count:
            outputs[at + i] = running + before
        running += total
        first += THREADS


@body
def find_hop(state, start, num_hops, place):
    """The hop of a node or an edge; state[start + h] is the end of hop h."""
    hop = np.int64(0)
    while hop < num_hops and place >= state[start + hop]:
        hop += 1
    return hop


@body
def find_key(seen, ranks, node):
    """Position of a node of the batch in `places`: its rank, or its id if there are no ranks."""
    return np.int64(node) if ranks.shape[0] == 0 else np.int64(rank_of(seen, ranks, node))


@gpu_kernel("i8[] i8 i8 i8[] i8[] i8[] u4[] i4[] i4[] u4[]")
def settle_places_gpu(state, num_hops, num_classes, nodes, begins, totals, seen, ranks, places, cleared):
    """Positions of nodes become local ids within their classes; bits of nodes are cleared in `cleared` if it is not
    empty.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < state[NODES + num_hops]:
        key = find_key(seen, ranks, nodes[i])
        # Not so for a repeated seed; a local id is negative here, and never a place.
        if places[key] == i:
            hop = find_hop(state, NODES, num_hops, i)
            row = hop * (num_classes + 1)
            kind = last_at_most(begins, row, row + num_classes, i) - row
            places[key] = np.int32(-1 - (totals[hop * num_classes + kind] + i - begins[row + kind]))
        if cleared.shape[0] > 0:
            cleared[nodes[i] >> 5] = np.uint32(0)
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 i8[] u4[] i4[] i4[]")
def localize_ids_gpu(state, num_hops, sources, seen, ranks, places):
    """Ids of sources become local ids."""
    e = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while e < state[EDGES + num_hops]:
        sources[e] = -1 - np.int64(places[find_key(seen, ranks, sources[e])])
        e += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 i8[] u4[]")
def forget_nodes_gpu(state, num_hops, nodes, seen):
    """Clear the bits of the nodes of a batch."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < state[NODES + num_hops]:
        seen[nodes[i] >> 5] = np.uint32(0)
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 i8 i8 i8 i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8 i8[] i8[] i8[] i8[] i8 i8")
def export_typed_batch_gpu(state, num_hops, num_stages, num_classes, num_entries, node_starts, nodes, trees, begins,
                           firsts, totals, outputs, sources, targets, ids, order, expands_sources, seed_times,
                           out_nodes, out_pairs, out_ids, num_nodes, num_times):  # fmt: skip
    """The batch by class and entry, hop after hop within each.

    `out_nodes` gets nodes, and their trees if there are any. The first node of each class and the end of the last
    follow, then a zero for each class; the same of edges by entry; and `num_times` times of seeds. Pairs have sources
    of edges first. Edges have as many stages as hops, and stand in order; or one, of the places that `order` lists.
    """
    first = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    step = np.int64(cuda.gridDim.x) * THREADS
    i = first
    while i < num_nodes:
        hop = find_hop(state, NODES, num_hops, i)
        row = hop * (num_classes + 1)
        kind = last_at_most(begins, row, row + num_classes, i) - row
        at = outputs[kind] + totals[hop * num_classes + kind] + i - begins[row + kind]
        out_nodes[at] = nodes[i] - node_starts[kind]
        if trees.shape[0] > 0:
            out_nodes[num_nodes + at] = trees[i]
        i += step
    rest = 2 * num_nodes if trees.shape[0] > 0 else num_nodes
    edge_totals, id_starts = (num_hops + 2) * num_classes, num_classes + 1
    of_edges = 2 * num_classes + 1
    of_times = of_edges + 2 * num_entries + 1
    i = first
    while i < of_times + num_times:
        word = np.int64(0)
        if i <= num_classes:
            word = outputs[i]
        elif i >= of_times:
            word = seed_times[i - of_times]
        elif i >= of_edges and i - of_edges <= num_entries:
            word = outputs[id_starts + i - of_edges]
        out_nodes[rest + i] = word
        i += step
    pair_starts = id_starts + num_entries + 1
    e = first
    while e < out_ids.shape[0]:
        hop = find_hop(state, EDGES + 1, num_stages - 1, e)
        own = order[e] if order.shape[0] > 0 else e
        row = hop * (num_entries + 1)
        entry = last_at_most(firsts, row, row + num_entries, e) - row
        place = totals[edge_totals + hop * num_entries + entry] + e - firsts[row + entry]
        out_ids[outputs[id_starts + entry] + place] = ids[own]
        count = totals[edge_totals + num_stages * num_entries + entry]
        at = outputs[pair_starts + entry] + place
        source, target = sources[own], targets[own]
        if expands_sources:
            source, target = target, source
        out_pairs[at] = source
        out_pairs[at + count] = target
        e += step
