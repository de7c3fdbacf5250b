"""Exchange of the rows of a batch's nodes after its last hop: every count stays on the device.

`frontier_segments.count_owners_gpu` numbers the nodes of each hop by owner and type. A segment of ids, int64, begins
with the number of ids of each type. Then come the ids, in room for `starts[k + 1] - starts[k]` of each type `k`. Owners
find the positions of their rows, and rows travel back at the same places, one array for each attribute.

Rows come from the other parts alone, in the order of their numbers. Nodes of the own part are not sent: their rows
stand behind the received rows, in room by `own_starts`. Nodes whose rows are copied here count as nodes of the own
part; they are listed by type, and their rows are written over the others at last.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, cuda, gpu_kernel
from pyg_direct.kernels.batch_counters import NODES
from pyg_direct.kernels.binary_search import last_at_most
from pyg_direct.kernels.local_ids.bitmap import find_place
from pyg_direct.kernels.sampling.captured_hops import find_hop

_RANK_BITS = np.int64(32)
_RANK = np.int64(0xFFFFFFFF)


@gpu_kernel("i8[] i8 i8 i8[] i8[] i8[] i8[] i8[] i4[] i8[] i8 i8 i8 i8[] i8[] i8[] i8 u4[] i4[] i8[] i8 u4[] i4[] "
            "i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8 i8[]")  # fmt: skip
def fill_row_segments_gpu(state, num_hops, num_types, begins, totals, outputs, nodes, id_starts, counts, numbered,
                          num_parts, own, length, starts, own_starts, first_nodes, num_ids, bits, ranks, first_copies,
                          num_copied, copy_bits, copy_ranks, copy_counts, copy_targets, copy_sources, to_send,
                          own_places, slots, needs, need, outbox):  # fmt: skip
    """Write the nodes of all hops to the segments of their owners, after `count_owners_gpu`.

    `numbered` has the bucket of each node and its number there. `first_nodes` has the nodes of the own part before each
    type. `slots` gets the place of each node's rows, in the order of the finished batch; `own_places` gets positions in
    the own part. `needs[need:]` gets the most ids of a segment by type, then of the own part, if they did not fit.
    `outbox` gets the number of nodes whose rows other parts send.

    `first_copies` has the copied rows before each type, and `copy_bits` and `copy_ranks` are their directory. For nodes
    with copies, `copy_counts` gets their number by type, zero before. `copy_targets` gets places among the nodes of
    the type, and `copy_sources` positions among its copied rows, in room by `own_starts` and in any order.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        k = np.int64(cuda.threadIdx.x)
        while k < num_parts * num_types:
            part, kind = k // num_types, k % num_types
            count, room, word = np.int64(counts[k]), starts[kind + 1] - starts[kind], need + kind
            to_send[part * length + kind] = 0 if part == own else min(count, room)
            if part == own:
                room, word = own_starts[kind + 1] - own_starts[kind], need + num_types + kind
            if count > room:
                cuda.atomic.max(needs, word, count)
            k += THREADS
        if cuda.threadIdx.x == 0:
            remote = np.int64(0)
            for k in range(num_parts * num_types):
                if k // num_types != own:
                    remote += counts[k]
            outbox[0] = remote
    while i < state[NODES + num_hops]:
        bucket, number = numbered[i] >> _RANK_BITS, numbered[i] & _RANK
        part, kind = bucket // num_types, bucket % num_types
        hop = find_hop(state, NODES, num_hops, i)
        at = outputs[kind] + totals[hop * num_types + kind] + i - begins[hop * (num_types + 1) + kind]
        node, room = nodes[i] + id_starts[kind], starts[kind + 1] - starts[kind]
        slots[at] = 0
        if part == own:
            if number < own_starts[kind + 1] - own_starts[kind]:
                found = find_place(bits, ranks, node, num_ids)
                if found < 0:
                    copied = find_place(copy_bits, copy_ranks, node, num_copied)
                    if copied < 0:
                        cuda.atomic.max(needs, np.int64(needs.shape[0]) - 1, np.int64(1))
                    else:
                        place = own_starts[kind] + cuda.atomic.add(copy_counts, kind, 1)
                        copy_targets[place] = at - outputs[kind]
                        copy_sources[place] = copied - first_copies[kind]
                own_places[own_starts[kind] + number] = max(np.int64(0), found - first_nodes[kind])
                slots[at] = (num_parts - 1) * room + number
        elif number < room:
            to_send[part * length + num_types + starts[kind] + number] = node
            slots[at] = (part - 1 if part > own else part) * room + number
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 i8 i8 i8 i8[] i8[] i8 u4[] i4[] i8[] i4[] i8[] i8[] i8[]")
def locate_row_ids_gpu(received, num_types, num_parts, own, length, starts, first_nodes, num_ids, bits, ranks, needs,
                       counts, copy_counts, places, outbox):  # fmt: skip
    """Find the positions of received ids among the rows of their type: type after type, other part after part in each.

    A place without an id gets the first row. `counts` and `copy_counts` are cleared for the next batch; the latter
    stand in the outbox behind its first word.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    room = starts[num_types]
    if cuda.blockIdx.x == 0:
        k = np.int64(cuda.threadIdx.x)
        while k < counts.shape[0]:
            counts[k] = 0
            k += THREADS
        k = np.int64(cuda.threadIdx.x)
        while k < num_types:
            outbox[1 + k] = copy_counts[k]
            copy_counts[k] = 0
            k += THREADS
    while i < (num_parts - 1) * room:
        other, within = i // room, i % room
        part = other + 1 if other >= own else other
        kind = last_at_most(starts, 0, num_types, within)
        number, found = within - starts[kind], np.int64(0)
        if number < received[part * length + kind]:
            found = find_place(bits, ranks, received[part * length + num_types + within], num_ids)
            if found < 0:
                cuda.atomic.max(needs, np.int64(needs.shape[0]) - 1, np.int64(1))
            found = max(np.int64(0), found - first_nodes[kind])
        places[(num_parts - 1) * starts[kind] + other * (starts[kind + 1] - starts[kind]) + number] = found
        i += np.int64(cuda.gridDim.x) * THREADS
