"""Links as seeds of a plan with types on a GPU: negatives are drawn, and later all ends are found among the nodes.

A batch may leave out the edges of its links, which are found too.

An inbox has a table of `TABLE` words a batch: its links, its negatives, and two counters of negatives. These count the
ones later than their link, and the strict ones that are edges after all tries. Then, batch after batch: sources,
targets, and `width` times of each link.

The ends of a batch are the given ones and then the negatives. Negative j belongs to link j modulo the number of links.
A batch with triplets has negative targets alone.

If edges that negatives avoid lie in several parts, several candidates are drawn for each negative at once. Owners of
edges say which are edges, and the first one that is none is chosen.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cuda, gpu_kernel
from pyg_direct.kernels.batch_counters import HEADER, NEGATIVE_DRAW, NUM_EXCLUDED, NUM_SEEDS
from pyg_direct.kernels.binary_search import first_above, first_not_below
from pyg_direct.kernels.sampling.excluded_edges import is_listed
from pyg_direct.kernels.sampling.random import draw, draw_below

# Words of a batch before the links.
TABLE = 4
# Words of a relation that holds edges of the links: its first row, the first id of the neighbors' type, and 1 if
# targets of links are rows, 0 if sources are.
WAY = 3
_SHARE_BITS = np.uint64(2**52 - 1)


@body
def draw_end(key, number, slot, num_nodes, times, order, sums, until):
    """(node, 1 if time and weights allow it, otherwise 0) of a negative, as `sampling.negative_links.Nodes` draws it.

    `slot` is the number of the try. `times`, `order` and `sums` are empty without times, or without weights.
    """
    bound = np.int64(num_nodes)
    if times.shape[0] > 0:
        bound = first_above(times, 0, times.shape[0], until)
    is_allowed = np.int64(bound > 0)
    bound = max(bound, np.int64(1))
    if sums.shape[0] == 0:
        place = draw_below(key, number, slot, bound)
    else:
        total, place = sums[bound], np.int64(0)
        if total > 0.0:
            share = np.float64((draw(key, number, slot) >> np.uint64(12)) & _SHARE_BITS) * 2.0**-52 * total
            # Sums after each node that are not above the share.
            place = min(first_above(sums, 1, num_nodes + 1, share) - 1, bound - 1)
        else:
            is_allowed = np.int64(0)
    if order.shape[0] > 0:
        place = order[place]
    return place, is_allowed


@gpu_kernel("i8[] i8[] i8 i8 i8 i8 i8 i8 i8 i8 i8[] i8[] f8[] i8 i8[] i8[] f8[] i8 i8[] i8[]")
def draw_links_gpu(arrived, inbox, given, num_batches, num_types, source_type, target_type, width, is_triplet,
                   num_sources, source_times, source_order, source_sums, num_targets, target_times, target_order,
                   target_sums, tries, avoided, more_avoided):  # fmt: skip
    """Write the ends of links and of their negatives to `arrived` as seeds, and then their times, tree after tree.

    `given` is the first word of the links in the inbox; see `load_typed_seeds_gpu` for the words before. A negative is
    drawn up to `tries` times until it is none of the avoided pairs: source * num_targets + target, ascending.
    """
    count, words = inbox[NUM_SEEDS], given + TABLE * num_batches
    batch, step = np.int64(0), np.int64(cuda.gridDim.x) * THREADS
    # Number among the pairs of the batch.
    p = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while batch < num_batches:
        num_links, num_negatives = inbox[given + TABLE * batch], inbox[given + TABLE * batch + 1]
        if p >= num_links + num_negatives:
            p -= num_links + num_negatives
            words += (2 + width) * num_links
            batch += 1
            continue
        begins = HEADER + num_batches + batch * num_types
        sources = num_links if is_triplet != 0 else num_links + num_negatives
        source_at, target_at, first_tree = inbox[begins + source_type], inbox[begins + target_type], inbox[begins]
        if source_type == target_type:
            target_at += sources
        own_times = words + 2 * num_links + width * (p % num_links)
        if p < num_links:
            source, target = inbox[words + p], inbox[words + num_links + p]
        else:
            key, number, until = inbox[HEADER + batch], p - num_links, np.int64(0)
            if width > 0:
                until = inbox[own_times + width - 1]
            source, target, is_timely = np.int64(0), np.int64(0), np.int64(1)
            if is_triplet != 0:
                source = inbox[words + p % num_links]
            slot, is_wrong = np.int64(0), np.int64(1)
            while is_wrong != 0 and slot < tries:
                target, is_timely = draw_end(draw(key, NEGATIVE_DRAW, 1), number, slot, num_targets, target_times,
                                             target_order, target_sums, until)  # fmt: skip
                if is_triplet == 0:
                    source, is_early = draw_end(draw(key, NEGATIVE_DRAW, 0), number, slot, num_sources, source_times,
                                                source_order, source_sums, until)  # fmt: skip
                    is_timely *= is_early
                pair, is_wrong = source * num_targets + target, np.int64(0)
                is_edge = is_listed(pair, avoided, np.int64(0), np.int64(avoided.shape[0]))
                if is_edge or is_listed(pair, more_avoided, np.int64(0), np.int64(more_avoided.shape[0])):
                    is_wrong = np.int64(1)
                slot += 1
            if is_timely == 0:
                cuda.atomic.add(inbox, given + TABLE * batch + 2, 1)
            if is_wrong != 0:
                cuda.atomic.add(inbox, given + TABLE * batch + 3, 1)
        arrived[target_at + p] = target
        if p < sources:
            arrived[source_at + p] = source
        for w in range(width):
            time = inbox[own_times + w]
            arrived[count + width * (first_tree + sources + p) + w] = time
            if p < sources:
                arrived[count + width * (first_tree + p) + w] = time
        p += step


@gpu_kernel("i8[] i8[] i8[] i8[] i8 i8 i8 i8 i8[] i8[] f8[] i8 i8[] i8[] f8[] i8 i8[]")
def draw_candidates_gpu(candidates, known, untimely, inbox, given, width, is_triplet, num_sources, source_times,
                        source_order, source_sums, num_targets, target_times, target_order, target_sums, tries,
                        avoided):  # fmt: skip
    """Draw the first `tries` candidates of each negative of the only batch, as `draw_links_gpu` draws them in turn.

    `candidates`, `[1 + room * tries]`, gets the number of negatives, and then source * num_targets + target of each
    candidate. Bit t of `known`, `[room]`, is set if candidate t is one of the `avoided` pairs, ascending; that of
    `untimely`, `[room]`, if it is later than its link. If there are too many negatives, their number alone is written.
    """
    num_links, count, room = inbox[given], inbox[given + 1], np.int64(known.shape[0])
    words, key = given + TABLE, inbox[HEADER]
    j = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if j == 0:
        candidates[0] = count
    while count <= room and j < count:
        link, until, source = j % num_links, np.int64(0), np.int64(0)
        if width > 0:
            until = inbox[words + 2 * num_links + width * link + width - 1]
        if is_triplet != 0:
            source = inbox[words + link]
        own_known, own_untimely = np.int64(0), np.int64(0)
        for slot in range(tries):
            target, is_timely = draw_end(draw(key, NEGATIVE_DRAW, 1), j, slot, num_targets, target_times, target_order,
                                         target_sums, until)  # fmt: skip
            if is_triplet == 0:
                source, is_early = draw_end(draw(key, NEGATIVE_DRAW, 0), j, slot, num_sources, source_times,
                                            source_order, source_sums, until)  # fmt: skip
                is_timely *= is_early
            pair = source * num_targets + target
            candidates[1 + tries * j + slot] = pair
            if is_listed(pair, avoided, np.int64(0), np.int64(avoided.shape[0])):
                own_known |= np.int64(1) << slot
            if is_timely == 0:
                own_untimely |= np.int64(1) << slot
        known[j], untimely[j] = own_known, own_untimely
        j += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 i8 i8 i8 i8[] i8[] i8")
def find_candidates_gpu(received, num_parts, tries, room, length, edges, answers, answer_length):
    """Find the candidates of all ranks that are edges of this part: bit t of an answer is set if candidate t is one.

    A received segment, `length` words, has the number of negatives, at most `room`, and `tries` candidates of each. The
    answers for a rank are a segment of `answer_length` words. `edges` are pairs as candidates are, ascending.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < num_parts * room:
        part, j = i // room, i % room
        if j < received[part * length]:
            found, at = np.int64(0), part * length + 1 + tries * j
            for slot in range(tries):
                if is_listed(received[at + slot], edges, np.int64(0), np.int64(edges.shape[0])):
                    found |= np.int64(1) << slot
            answers[part * answer_length + j] = found
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] i8[] i8 i8 i8[] i8 i8 i8[] i8 i8 i8 i8 i8 i8 i8[] i8[] i8")
def choose_negatives_gpu(candidates, known, untimely, tries, most, answers, num_parts, answer_length, inbox, given,
                         num_types, source_type, target_type, is_triplet, num_targets, arrived, needs,
                         need):  # fmt: skip
    """Replace negatives that are pairs to avoid by their first candidates that are not.

    `answers` has a segment of each part, see `find_candidates_gpu`; `arrived` has the first candidates as negatives. If
    all of a negative's candidates are pairs to avoid, `needs` gets how many are to be drawn instead of `tries`; of
    `most`, the last one stays, and is counted in the inbox.
    """
    num_links, count, room = inbox[given], candidates[0], np.int64(known.shape[0])
    begins = HEADER + 1
    j = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while count <= room and j < count:
        found, slot = known[j], np.int64(0)
        for part in range(num_parts):
            found |= answers[part * answer_length + j]
        while slot < tries - 1 and (found >> slot) & 1 != 0:
            slot += 1
        if (found >> slot) & 1 != 0:
            if tries < most:
                cuda.atomic.max(needs, need, min(2 * tries, most))
            else:
                cuda.atomic.add(inbox, given + 3, 1)
        if slot > 0:
            pair, late = candidates[1 + tries * j + slot], (untimely[j] >> slot) & 1
            if late != untimely[j] & 1:
                cuda.atomic.add(inbox, given + 2, 2 * late - 1)
            source_at, target_at = inbox[begins + source_type] + num_links, inbox[begins + target_type] + num_links
            if source_type == target_type:
                target_at += num_links
                if is_triplet == 0:
                    target_at += count
            arrived[target_at + j] = pair % num_targets
            if is_triplet == 0:
                arrived[source_at + j] = pair // num_targets
        j += np.int64(cuda.gridDim.x) * THREADS


@body
def pair_of(i, num_links, arrived, source_at, target_at, ways):
    """(row, neighbor) of pair `i` of a batch, way after way and link after link."""
    way = i // num_links
    link = i - way * num_links
    row, neighbor = arrived[source_at + link], arrived[target_at + link]
    if ways[WAY * way + 2] != 0:
        row, neighbor = neighbor, row
    return row + ways[WAY * way], neighbor + ways[WAY * way + 1]


@gpu_kernel("i8[] i8[] i8 i8 i8 i8 i8 i8[] i8[] i8[] I[] i8[]", I=("i4", "i8"))
def find_link_edges_gpu(state, inbox, given, num_batches, num_types, source_type, target_type, arrived, ways, indptr,
                        indices, found):  # fmt: skip
    """Find the edges of the given links of each batch, in any order; a block takes a pair at a time.

    `arrived` holds the ends, as `draw_links_gpu` writes them, and `ways` the relations to look in, `WAY` words each.
    Edges are numbers as in `excluded_edges.py`. `state[NUM_EXCLUDED]`, 0 before, receives their number; as many are
    written as there is room for.
    """
    # Words that one thread reads, as they may be memory of the host; and 1 if an earlier pair is equal.
    shared = cuda.shared.array(4, np.int64)
    batch, read, num_ways = np.int64(0), np.int64(-1), np.int64(ways.shape[0]) // WAY
    i = np.int64(cuda.blockIdx.x)
    while batch < num_batches:
        if batch != read:
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                begins, own = HEADER + num_batches + batch * num_types, given + TABLE * batch
                shared[0] = inbox[own]
                shared[1] = inbox[begins + source_type]
                shared[2] = inbox[begins + target_type]
                if source_type == target_type:
                    # Targets stand after all sources.
                    shared[2] = inbox[begins + source_type + 1] - inbox[own] - inbox[own + 1]
            cuda.syncthreads()
            read = batch
        num_links, source_at, target_at = shared[0], shared[1], shared[2]
        if i >= num_links * num_ways:
            i -= num_links * num_ways
            batch += 1
            continue
        row, neighbor = pair_of(i, num_links, arrived, source_at, target_at, ways)
        if cuda.threadIdx.x == 0:
            shared[3] = 0
        cuda.syncthreads()
        j = np.int64(cuda.threadIdx.x)
        while j < i:
            other_row, other = pair_of(j, num_links, arrived, source_at, target_at, ways)
            if other_row == row and other == neighbor:
                shared[3] = 1
            j += THREADS
        cuda.syncthreads()
        if shared[3] == 0:
            position = indptr[row] + cuda.threadIdx.x
            while position < indptr[row + 1]:
                if np.int64(indices[position]) == neighbor:
                    at = cuda.atomic.add(state, NUM_EXCLUDED, 1)
                    if at < found.shape[0]:
                        found[at] = batch * indices.shape[0] + position
                position += THREADS
        cuda.syncthreads()
        i += np.int64(cuda.gridDim.x)


@gpu_kernel("i8[] i8[] i8 i8 i8 i8 i8 i8 i8 i8 i8 i8 i8 i8 i8 i8[] i8[] f4[] i8[]")
def place_links_gpu(nodes, ends, num_links, num_negatives, is_triplet, source_at, target_at, times_at, source_first,
                    source_end, source_start, target_first, target_end, target_start, disjoint, trees, places, labels,
                    times):  # fmt: skip
    """Local ids of the ends of a batch's links, which `draw_links_gpu` has written to `ends`.

    Sources are looked up in nodes[source_first : source_end], ascending, as ids that begin at `source_start`; targets
    likewise. If ends have trees, they are numbered from `source_first` and `target_first` instead, and `trees` become
    numbers of links. `places` gets sources, then targets. Those of triplets are followed by the negatives of each link.
    """
    sources = num_links if is_triplet != 0 else num_links + num_negatives
    # Cast, as the other compiler has no maximum of shapes.
    most = max(max(np.int64(places.shape[0]), np.int64(trees.shape[0])), np.int64(times.shape[0]))
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < most:
        if i < places.shape[0]:
            p, at, first, end, start = i, source_at, source_first, source_end, source_start
            if i >= sources:
                p, at, first, end, start = i - sources, target_at, target_first, target_end, target_start
            place = p + first
            if disjoint == 0:
                place = first_not_below(nodes, first, end, ends[at + p] + start) - first
            out = i
            if is_triplet != 0 and p >= num_links:
                number = p - num_links
                out = 2 * num_links + (number % num_links) * (num_negatives // num_links) + number // num_links
            places[out] = place
        if i < labels.shape[0]:
            labels[i] = np.float32(1) if i < num_links else np.float32(0)
        if i < times.shape[0]:
            times[i] = ends[times_at + i]
        if i < trees.shape[0]:
            tree = trees[i]
            trees[i] = (tree if tree < sources else tree - sources) % num_links
        i += np.int64(cuda.gridDim.x) * THREADS
