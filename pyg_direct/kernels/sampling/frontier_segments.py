"""Exchange stages of a hop over a graph in parts: every count stays on the device, and every message has a fixed size.

A rank sends its frontier to the owners of the nodes, and receives their edges. A message to each of P ranks is a
segment of fixed length; the sizes stand in the segment. `captured_hops.py` has the steps before and after.

A segment of the frontier, int64, begins with the number of nodes of each type, and the key of the batch. Then come
`room` nodes, type after type, and as many trees and times if the plan has them; twice as many times for windows. Nodes
are ids of the id space of all types. Their order within a type is any: draws depend on key, node and slot alone.

A segment of answers, int32 or int64: the first edge of each item in the segment, and the end of the last, in
`num_items` words; then `most` neighbors; then `most` edge ids. Items are the nodes of each relation, relation after
relation.

The frontier of the last request of an induced subgraph is the nodes of all hops.

`slots`, int64, has the place of each node of the frontier: owner * room + position in the segment, -1 if it was not
sent. `needs`, int64, has the most nodes and edges of a segment of each request if they did not fit. Its last
but one is a flag for a batch that did not fit in another way. Its last is a flag for an id that its owner does not
hold. A segment that is too small is sent empty.

Pairs whose edges a batch leaves out go to all ranks before the first hop. A segment has their number, and then `room`
relations, expanded nodes and neighbors. Each rank finds the edges that it holds.

Rows travel in the same way. A segment of ids has the form of a frontier of one type; rows come back at the same places.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cuda, gpu_kernel
from pyg_direct.kernels.batch_counters import HEADER, NEEDED_EDGES, NEEDED_ITEMS
from pyg_direct.kernels.binary_search import last_at_most
from pyg_direct.kernels.local_ids.bitmap import find_place
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block, sum_block
from pyg_direct.kernels.sampling.remote_edges import find_owner
from pyg_direct.kernels.sampling.worklist import (
    BATCH,
    COLUMNS,
    FANOUT,
    FIRST,
    FRONT,
    KEY,
    LOCAL,
    RELATION,
    count_all_items,
    find_entry,
    frontier_place,
    tree_of,
)

# Parts times node types up to which a block counts them in shared memory.
SHARED_BUCKETS = 256
_RANK_BITS = np.int64(32)
_RANK = np.int64(0xFFFFFFFF)


@body
def sum_words(words, begin, count):
    """Sum of words[begin : begin + count]."""
    total = np.int64(0)
    for i in range(begin, begin + count):
        total += words[i]
    return total


@gpu_kernel("i8[] i8 i8 i8 i8[] i8[] i8 i8[] T[] i4[] i8[]", T=("u1", "i2"))
def count_owners_gpu(begins, first, num_hops, num_types, nodes, id_starts, num_parts, bounds, table, counts,
                     slots):  # fmt: skip
    """Count the nodes of hops that follow each other by owner and type; `slots` gets the number of each in its bucket.

    `begins[first:]` has the first node of each type, and the end, for each hop. `counts`, int32 `[P * T]`, is zero
    before.
    """
    own_counts = cuda.shared.array(SHARED_BUCKETS, np.int32)
    firsts = cuda.shared.array(SHARED_BUCKETS, np.int32)
    tid, num_buckets = np.int64(cuda.threadIdx.x), num_parts * num_types
    # More buckets are counted in global memory, node after node.
    num_shared = num_buckets if num_buckets <= SHARED_BUCKETS else np.int64(0)
    # A hop ends where the next one begins, whose first type is found then.
    num_begins = num_hops * (num_types + 1) - 1
    begin = begins[first]
    own_begin, own_end = own_range(begins[first + num_begins] - begin)
    tile = own_begin
    while tile < own_end:
        k = tid
        while k < num_shared:
            own_counts[k] = 0
            k += THREADS
        cuda.syncthreads()
        i, bucket, rank = begin + tile + tid, np.int64(0), np.int64(0)
        if tile + tid < own_end:
            kind = (last_at_most(begins, first, first + num_begins, i) - first) % (num_types + 1)
            owner = find_owner(nodes[i] + id_starts[kind], num_parts, bounds, table)
            bucket = owner * num_types + kind
            if num_shared > 0:
                rank = np.int64(cuda.atomic.add(own_counts, bucket, 1))
            else:
                rank = np.int64(cuda.atomic.add(counts, bucket, 1))
        cuda.syncthreads()
        k = tid
        while k < num_shared:
            if own_counts[k] > 0:
                firsts[k] = cuda.atomic.add(counts, k, own_counts[k])
            k += THREADS
        cuda.syncthreads()
        if tile + tid < own_end:
            if num_shared > 0:
                rank += firsts[bucket]
            slots[i] = (bucket << _RANK_BITS) + rank
        tile += THREADS


@gpu_kernel("i8[] i8 i8 i8 i8[] i8[] i8 i8[] i8[] i8[] i8 i8 i8 i8[] i8 i8[] i4[] i8[] i8[] i8[] i8")
def fill_segments_gpu(begins, first, num_hops, num_types, nodes, trees, num_times, seed_times, id_starts, inbox,
                      num_parts, room, length, template, own, bases, counts, slots, to_send, needs, need):  # fmt: skip
    """Write the nodes of these hops to the segments of their owners, after `count_owners_gpu`.

    `template[own:]` has the entries of the request. `bases`, int64 `[P * R]`, gets the number that turns the position
    of a node in a segment into its item of a relation there.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        relations = np.int64(bases.shape[0]) // num_parts
        k = np.int64(cuda.threadIdx.x)
        while k < num_parts * relations:
            part, relation = k // relations, k % relations
            base = -sum_words(counts, part * num_types, template[own + relation * COLUMNS + FRONT])
            for r in range(relation):
                if template[own + r * COLUMNS + FANOUT] != 0:
                    base += counts[part * num_types + template[own + r * COLUMNS + FRONT]]
            bases[k] = base
            k += THREADS
        part = np.int64(cuda.threadIdx.x)
        while part < num_parts:
            total = sum_words(counts, part * num_types, num_types)
            for kind in range(num_types):
                to_send[part * length + kind] = counts[part * num_types + kind] if total <= room else 0
            to_send[part * length + num_types] = inbox[HEADER]
            if total > room:
                cuda.atomic.max(needs, need, total)
            part += THREADS
    i += begins[first]
    while i < begins[first + num_hops * (num_types + 1) - 1]:
        bucket, rank = slots[i] >> _RANK_BITS, slots[i] & _RANK
        part, kind = bucket // num_types, bucket % num_types
        place = sum_words(counts, part * num_types, kind) + rank
        if sum_words(counts, part * num_types, num_types) > room:
            slots[i] = -1
        else:
            at = part * length + num_types + 1 + place
            to_send[at] = nodes[i] + id_starts[kind]
            if trees.shape[0] > 0:
                to_send[at + room] = trees[i]
                if seed_times.shape[0] > 0:
                    for k in range(num_times):
                        to_send[at + (2 + k) * room] = seed_times[num_times * trees[i] + k]
            slots[i] = part * room + place
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 i8[] i8 i8 i8 i4[] i8[]")
def list_asked_gpu(template, own, received, num_types, num_parts, length, counts, work):
    """List the work that received frontiers ask for, part after part; one block.

    `template[own:]` has the columns of an entry for each relation that do not depend on a batch; FRONT is its type.
    `work` has room for one part more, so that entries of the last part have an end. `counts` is cleared for the next
    hop.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    tid, entries = np.int64(cuda.threadIdx.x), np.int64(work.shape[0] // COLUMNS)
    relations = entries // (num_parts + 1)
    k = tid
    while k < counts.shape[0]:
        counts[k] = 0
        k += THREADS
    running, first = np.int64(0), np.int64(0)
    while first < entries:
        a, count = first + tid, np.int64(0)
        if a < num_parts * relations:
            at, source, segment = a * COLUMNS, own + a % relations * COLUMNS, a // relations * length
            for column in range(COLUMNS):
                work[at + column] = template[source + column]
            kind = template[source + FRONT]
            if template[source + FANOUT] != 0:
                count = received[segment + kind]
            work[at + FRONT] = segment + num_types + 1 + sum_words(received, segment, kind)
            # The target of an edge is the place of its node, by which its tree is found.
            work[at + LOCAL] = work[at + FRONT]
            work[at + KEY] = received[segment + num_types]
            # A part has one batch, whose excluded edges are found by its number.
            work[at + BATCH] = a // relations
        before, total = scan_block(count, shared)
        if a < entries:
            work[a * COLUMNS + FIRST] = running + before
        running += total
        first += THREADS


@gpu_kernel("i8[] i8 i8 i8 i8 i8 i8 u4[] i4[] i8[] i8[] i8 i8[]")
def locate_asked_gpu(received, num_types, num_parts, room, length, is_dense, num_ids, bits, ranks, needs, places,
                     num_times, times):  # fmt: skip
    """Positions of received nodes among the nodes of this part: at the same places, or side by side if `is_dense`.

    `times` gets the times of each node side by side, at `num_times` times its place; `[0]` to leave them out.
    """
    j = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while j < num_parts * room:
        segment, place = j // room * length, j % room
        if place < sum_words(received, segment, num_types):
            at = segment + num_types + 1 + place
            found = find_place(bits, ranks, received[at], num_ids)
            if found < 0:
                cuda.atomic.max(needs, np.int64(needs.shape[0]) - 1, np.int64(1))
                found = np.int64(0)
            places[j if is_dense else at] = found
            if times.shape[0] > 0:
                for k in range(num_times):
                    times[num_times * at + k] = received[at + (2 + k) * room]
        j += np.int64(cuda.gridDim.x) * THREADS


@body
def find_asking(work, width, num_parts, item):
    """The part whose items, among those of all parts, hold `item`."""
    low, high = np.int64(0), num_parts
    while high - low > 1:
        middle = (low + high) >> 1
        if work[middle * width + FIRST] <= item:
            low = middle
        else:
            high = middle
    return low


@body
def find_receiver(work, width, num_parts, offsets, e):
    """The part that edge `e` goes to."""
    low, high = np.int64(0), num_parts
    while high - low > 1:
        middle = (low + high) >> 1
        if offsets[work[middle * width + FIRST]] <= e:
            low = middle
        else:
            high = middle
    return low


@gpu_kernel("i8[] i8 i8[] i8 i8[] i8[] i8[] i8[] i8[] i8 i8 W[] i8[] i8", W=("i4", "i8"))
def pack_answers_gpu(work, num_parts, state, edges, offsets, sources, ids, targets, trees, num_items, most, answers,
                     needs, need):  # fmt: skip
    """Edges in the order of the items become answers; trees, which the receiver knows, are removed from sources.

    `edges` is the word of `state` with the number of edges.
    """
    width, length = np.int64(work.shape[0]) // (num_parts + 1), num_items + 2 * most
    start = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    step = np.int64(cuda.gridDim.x) * THREADS
    if start < num_parts:
        first, end = work[start * width + FIRST], work[(start + 1) * width + FIRST]
        size = offsets[end] - offsets[first]
        answers[start * length + end - first] = size if size <= most else 0
        if size > most:
            cuda.atomic.max(needs, need, size)
    if start == 0 and state[NEEDED_EDGES] > 0:
        # More than all segments hold: at least one of them has more than its share.
        cuda.atomic.max(needs, need, (state[NEEDED_EDGES] + num_parts - 1) // num_parts)
        state[NEEDED_EDGES] = 0
    item = start
    while item < count_all_items(work):
        part = find_asking(work, width, num_parts, item)
        first, end = work[part * width + FIRST], work[(part + 1) * width + FIRST]
        begin = offsets[first]
        is_full = offsets[end] - begin > most
        answers[part * length + item - first] = 0 if is_full else offsets[item] - begin
        item += step
    e = start
    while e < state[edges]:
        part = find_receiver(work, width, num_parts, offsets, e)
        begin = offsets[work[part * width + FIRST]]
        if offsets[work[(part + 1) * width + FIRST]] - begin <= most:
            at = part * length + num_items + e - begin
            answers[at] = sources[e] - tree_of(trees, targets[e])
            answers[at + most] = ids[e]
        e += step


@gpu_kernel("i8[] i8[] i8 i8[] i8 i8 i8 W[] i8[] i8[] i8[] i8[]", W=("i4", "i8"))
def read_answers_gpu(work, slots, relations, bases, room, num_items, most, answers, starts, sizes, counts, block_sums):
    """Number and first place of the edges that answers have for each item of the own work list.

    `block_sums` gets the edges of each block's items.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    length = num_items + 2 * most
    own_begin, own_end = own_range(count_all_items(work))
    own_edges = np.int64(0)
    item = own_begin + cuda.threadIdx.x
    while item < own_end:
        entry = find_entry(work, item)
        slot, start, count = slots[frontier_place(work, entry, item)], np.int64(0), np.int64(0)
        if slot >= 0:
            part = slot // room
            at = part * length + bases[part * relations + work[entry + RELATION]] + slot % room
            count = np.int64(answers[at + 1]) - np.int64(answers[at])
            start = part * length + num_items + np.int64(answers[at])
        starts[item], sizes[item], counts[item] = start, count, count
        own_edges += count
        item += THREADS
    total, _ = sum_block(own_edges, np.int64(0), shared)
    if cuda.threadIdx.x == 0:
        block_sums[cuda.blockIdx.x] = total


@gpu_kernel("i8[] i8 i8 i8 i8[] i8[] i8[] i8")
def send_pairs_gpu(pairs, num_words, num_parts, length, to_send, num_found, needs, need):
    """Copy pairs of this rank's batch, of `num_words` words each, to the segments of all ranks.

    `pairs`, `[1 + num_words * room]`, has their number. Pairs whose edges the batch leaves out follow as relations,
    expanded nodes as ids within their types, and neighbors as ids of the id space. Negatives follow as candidates
    (`link_ends.py`). More than there is room for are not sent. `num_found`, `[1]`, is cleared.
    """
    count, room = pairs[0], (np.int64(pairs.shape[0]) - 1) // num_words
    k = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if k == 0:
        num_found[0] = 0
        if count > room:
            cuda.atomic.max(needs, need, count)
    while k < num_parts * pairs.shape[0]:
        part, word = k // pairs.shape[0], k % pairs.shape[0]
        if word > 0:
            to_send[part * length + word] = pairs[word]
        else:
            to_send[part * length] = count if count <= room else 0
        k += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 i8 i8 i8[] i8[] i8 u4[] i4[] i8[] I[] i8[] i8[] i8[] i8", I=("i4", "i8"))
def find_pair_edges_gpu(received, num_parts, room, length, id_starts, row_shifts, num_ids, bits, ranks, indptr, indices,
                        num_found, found, needs, need):  # fmt: skip
    """Find the edges of this part between received pairs, in any order; a block takes a pair at a time.

    `id_starts`, int64 `[R]`, turns an expanded node of a relation into an id of the id space. `row_shifts`, int64
    `[R]`, turns its position among the nodes of the part into its row. An edge is part * number of edges + position.
    `num_found`, 0 before, receives their number. As many are written as there is room for; `needs` has how many there
    are otherwise.
    """
    shared = cuda.shared.array(1, np.int64)
    i = np.int64(cuda.blockIdx.x)
    while i < num_parts * room:
        segment, pair, row = i // room * length, i % room, np.int64(-1)
        # Equal for all threads of the block.
        if pair < received[segment]:
            at = segment + 1 + pair
            relation, expanded, neighbor = received[at], received[at + room], received[at + 2 * room]
            place = find_place(bits, ranks, expanded + id_starts[relation], num_ids)
            if place >= 0:
                row = place + row_shifts[relation]
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            shared[0] = 0
        cuda.syncthreads()
        if row >= 0:
            # An earlier pair that is equal has found the edges.
            j = segment + 1 + cuda.threadIdx.x
            while j < at:
                if received[j] == relation and received[j + room] == expanded and received[j + 2 * room] == neighbor:
                    shared[0] = 1
                j += THREADS
        cuda.syncthreads()
        if row >= 0 and shared[0] == 0:
            position = indptr[row] + cuda.threadIdx.x
            while position < indptr[row + 1]:
                if np.int64(indices[position]) == neighbor:
                    number = cuda.atomic.add(num_found, 0, 1)
                    if number < found.shape[0]:
                        found[number] = i // room * np.int64(indices.shape[0]) + position
                    else:
                        cuda.atomic.max(needs, need, number + 1)
                position += THREADS
        i += np.int64(cuda.gridDim.x)


@gpu_kernel("i8[] i8[] i8 i8 i8 i8[]")
def send_needs_gpu(needs, state, num_parts, length, first, to_send):
    """Copy the needs of this rank's batch to the segments of all ranks, from word `first` of each; one block.

    A segment has `length` words. `state` may lie on the host.
    """
    count = np.int64(needs.shape[0])
    if cuda.threadIdx.x == 0 and (state[NEEDED_EDGES] > 0 or state[NEEDED_ITEMS] > 0):
        needs[count - 2] = 1
    cuda.syncthreads()
    k = np.int64(cuda.threadIdx.x)
    while k < num_parts * count:
        to_send[k // count * length + first + k % count] = needs[k % count]
        k += THREADS


@gpu_kernel("i8[] i8 i8 i8 i8[] i8[]")
def agree_needs_gpu(received, num_parts, length, first, needs, outbox):
    """Leave the largest needs of all ranks to the host, and reset the needs of this rank; one block.

    Segments are those of `send_needs_gpu`. Needs of this rank may have grown since.
    """
    k, count = np.int64(cuda.threadIdx.x), np.int64(needs.shape[0])
    while k < count:
        most = needs[k]
        for part in range(num_parts):
            most = max(most, received[part * length + first + k])
        outbox[k], needs[k] = most, 0
        k += THREADS
