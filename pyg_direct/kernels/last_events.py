"""Last events of each node: its latest neighbors, and its events in the batch in which it came last.

Latest neighbors are rows of `size` slots, the latest event first, slots without an event at the end.

`neighbors` and `e_id`, int64 `[N * size]`, hold the other node and the number of an event; a number of -1 is a slot
without one. A batch of B events has 2 B ends: end 2 k belongs to dst[k], end 2 k + 1 to src[k]. `nodes` lists their
nodes ascending and `order` their numbers, which ascend for equal nodes.

`state` is int64 `[4]`: the edges and the nodes of a read, an id of events outside [0, N), and such an id of a read;
0 stands for none, as no row of an empty table is read.

Messages are the events of a node in its last batch, as one of two roles: source or destination. A log holds the events
of many batches in rows. `rows` lists the rows of a role, ascending by node within a batch; a node's events are
rows[begins[v]:ends[v]], and `latest[v]` is the row of the latest one, -1 without events. Of equal times the last one
counts.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cpu_sequence, cuda, gpu_kernel, prange
from pyg_direct.kernels.binary_search import first_above
from pyg_direct.kernels.local_ids.bitmap import bit_of, count_bits, rank_of
from pyg_direct.kernels.local_ids.new_nodes import emit_word

EDGES, NODES, BAD_EVENT, BAD_NODE = 0, 1, 2, 3
STATE = 4


@body
def is_node(node, num_nodes):
    """Check that a node lies in [0, N)."""
    return np.uint64(node) < np.uint64(num_nodes)


@body
def put_latest(nodes, order, src, dst, first_event, place, size, neighbors, e_id):
    """Write the latest ends of the node whose last end is at `place` to its row, and move those of earlier batches
    back.
    """
    node = nodes[place]
    count = np.int64(1)
    while count < size and place - count >= 0 and nodes[place - count] == node:
        count += 1
    row = node * size
    for slot in range(size - count):
        to = row + size - 1 - slot
        e_id[to], neighbors[to] = e_id[to - count], neighbors[to - count]
    for slot in range(count):
        end = order[place - slot]
        event = end >> 1
        e_id[row + slot] = first_event + event
        neighbors[row + slot] = dst[event] if end & 1 else src[event]


@body
def is_last_end(nodes, place):
    """Check that the end at `place` is the last end of its node."""
    return place + 1 == nodes.shape[0] or nodes[place + 1] != nodes[place]


@cpu_kernel
def insert_events_cpu(nodes, order, src, dst, first_event, size, neighbors, e_id):
    for place in prange(nodes.shape[0]):
        if is_last_end(nodes, place):
            put_latest(nodes, order, src, dst, first_event, place, size, neighbors, e_id)


@gpu_kernel("i8[] i8[] i8[] i8[] i8 i8 i8 i8[] i8[] i8[]")
def insert_events_gpu(nodes, order, src, dst, first_event, num_nodes, size, neighbors, e_id, state):
    place = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while place < nodes.shape[0]:
        if not is_node(nodes[place], num_nodes):
            state[BAD_EVENT] = nodes[place]
        elif is_last_end(nodes, place):
            put_latest(nodes, order, src, dst, first_event, place, size, neighbors, e_id)
        place += np.int64(cuda.gridDim.x) * THREADS


@cpu_sequence
def read_rows_cpu(n_id, size, neighbors, e_id, bits, ranks, nodes, edge_index, found):
    """Write the union of `n_id` and its neighbors to `nodes`, and the edges to them; returns (nodes, edges).

    `edge_index` is int64 `[2, n * size]`, with local ids, and `found` int64 `[n * size]` the numbers of the events.
    """
    for i in range(n_id.shape[0]):
        node = n_id[i]
        bits[node >> 5] |= bit_of(node)
        slot = node * size
        while slot < (node + 1) * size and e_id[slot] >= 0:
            bits[neighbors[slot] >> 5] |= bit_of(neighbors[slot])
            slot += 1
    num_nodes = 0
    for word in range(bits.shape[0]):
        ranks[word] = num_nodes
        if bits[word] != np.uint32(0):
            emit_word(bits[word], word, nodes, num_nodes)
            num_nodes += count_bits(bits[word])
    num_edges = 0
    for i in range(n_id.shape[0]):
        node = n_id[i]
        slot = node * size
        target = rank_of(bits, ranks, node)
        while slot < (node + 1) * size and e_id[slot] >= 0:
            edge_index[0, num_edges], edge_index[1, num_edges] = rank_of(bits, ranks, neighbors[slot]), target
            found[num_edges] = e_id[slot]
            num_edges += 1
            slot += 1
    return num_nodes, num_edges


@gpu_kernel("i8[] i8 i8 i8[] i8[] u4[] i8[] i8[]")
def mark_rows_gpu(n_id, num_nodes, size, neighbors, e_id, bits, counts, state):
    """A thread for each slot: set the bits of nodes and neighbors, and count the neighbors of each node."""
    at = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while at < n_id.shape[0] * size:
        i = np.int64(np.uint64(at) // np.uint64(size))
        slot = at - i * size
        node = n_id[i]
        if not is_node(node, num_nodes):
            state[BAD_NODE] = node
            counts[i] = 0
        else:
            row = node * size
            if slot == 0:
                cuda.atomic.or_(bits, node >> 5, bit_of(node))
            if e_id[row + slot] >= 0:
                other = neighbors[row + slot]
                if is_node(other, num_nodes):
                    cuda.atomic.or_(bits, other >> 5, bit_of(other))
                else:
                    # Each read reports it, until the rows are reset.
                    state[BAD_EVENT] = other
                if slot + 1 == size or e_id[row + slot + 1] < 0:
                    counts[i] = slot + 1
            elif slot == 0:
                counts[i] = 0
        at += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 i8 i8[] i8[] u4[] i4[] i8[] i8[] i8[] i8[] i8[] i8[]")
def emit_rows_gpu(n_id, num_nodes, size, neighbors, e_id, bits, ranks, counts, ends, nodes, edge_index, found, state):
    """A thread for each word of the bitmap, which writes its nodes; then a thread for each slot, which writes its edge.

    `edge_index` is int64 `[2 * n * size]`: sources, then targets. `ends` are the running sums of `counts`.
    """
    thread, step = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x, np.int64(cuda.gridDim.x) * THREADS
    num_slots = n_id.shape[0] * size
    if thread == 0:
        last = bits.shape[0] - 1
        state[NODES] = ranks[last] + count_bits(bits[last])
        state[EDGES] = ends[n_id.shape[0] - 1]
    for word in range(thread, bits.shape[0], step):
        emit_word(bits[word], word, nodes, np.int64(ranks[word]))
    for at in range(thread, num_slots, step):
        i = np.int64(np.uint64(at) // np.uint64(size))
        slot = at - i * size
        if slot < counts[i]:
            node = n_id[i]
            other = neighbors[node * size + slot]
            place = ends[i] - counts[i] + slot
            edge_index[place] = rank_of(bits, ranks, other) if is_node(other, num_nodes) else np.int64(0)
            edge_index[num_slots + place] = rank_of(bits, ranks, node)
            found[place] = e_id[node * size + slot]


@body
def note_event(nodes, order, times, first_row, place, rows, begins, ends, latest):
    """List the event at `place` of a batch; the last event of a node also notes the latest one."""
    node = nodes[place]
    rows[first_row + place] = first_row + order[place]
    if place == 0 or nodes[place - 1] != node:
        begins[node] = first_row + place
    if is_last_end(nodes, place):
        best, before = order[place], place - 1
        while before >= 0 and nodes[before] == node:
            event = order[before]
            # Equal nodes need not be in order: PyG's sort on a CPU is not stable.
            if times[event] > times[best] or (times[event] == times[best] and event > best):
                best = event
            before -= 1
        ends[node], latest[node] = first_row + place + 1, first_row + best


@cpu_kernel
def note_events_cpu(nodes, order, times, first_row, rows, begins, ends, latest):
    """`nodes` lists the nodes of a role ascending, int64 `[B]`, `order` their events, and `times` the events' times."""
    for place in prange(nodes.shape[0]):
        note_event(nodes, order, times, first_row, place, rows, begins, ends, latest)


@gpu_kernel("i8[] i8[] i8[] i8 i8[] i8[] i8[] i8[]")
def note_events_gpu(nodes, order, times, first_row, rows, begins, ends, latest):
    for place in range(cuda.blockIdx.x * THREADS + cuda.threadIdx.x, nodes.shape[0], cuda.gridDim.x * THREADS):
        note_event(nodes, order, times, first_row, np.int64(place), rows, begins, ends, latest)


@body
def count_event(n_id, i, begins_as_src, ends_as_src, begins_as_dst, ends_as_dst, nodes, counts):
    """Write a node, and the number of its events in both roles; returns False if it lies outside [0, N)."""
    node, is_known = n_id[i], True
    if not is_node(node, np.int64(begins_as_src.shape[0])):
        node, is_known = np.int64(0), False
    nodes[i] = node
    counts[i] = ends_as_src[node] - begins_as_src[node]
    counts[n_id.shape[0] + i] = ends_as_dst[node] - begins_as_dst[node]
    return is_known


@cpu_kernel
def count_events_cpu(n_id, begins_as_src, ends_as_src, begins_as_dst, ends_as_dst, nodes, counts):
    for i in prange(n_id.shape[0]):
        count_event(n_id, i, begins_as_src, ends_as_src, begins_as_dst, ends_as_dst, nodes, counts)


@gpu_kernel("i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[]")
def count_events_gpu(n_id, begins_as_src, ends_as_src, begins_as_dst, ends_as_dst, nodes, counts, errors):
    """Nodes outside [0, N) become node 0, and errors[0] gets one of them."""
    for i in range(cuda.blockIdx.x * THREADS + cuda.threadIdx.x, n_id.shape[0], cuda.gridDim.x * THREADS):
        if not count_event(n_id, i, begins_as_src, ends_as_src, begins_as_dst, ends_as_dst, nodes, counts):
            errors[0] = n_id[i]


@body
def find_event(number, ends, nodes, rows_as_src, begins_as_src, rows_as_dst, begins_as_dst):
    """Row of an event among all events of n nodes as sources, then as destinations; and 1 if it is one of the latter.

    `ends`, int64 `[2 n]`, are the running sums of their numbers.
    """
    place = first_above(ends, 0, ends.shape[0], number)
    within = number - ends[place - 1] if place > 0 else number
    if place < nodes.shape[0]:
        return rows_as_src[begins_as_src[nodes[place]] + within], np.int64(0)
    return rows_as_dst[begins_as_dst[nodes[place - nodes.shape[0]]] + within], np.int64(1)


@body
def choose_event(i, stand_in, ends, nodes, last_update, src, dst, times, rows_as_src, begins_as_src, latest_as_src,
                 rows_as_dst, begins_as_dst, latest_as_dst, owns, others, chosen, elapsed, latest_times):  # fmt: skip
    """Write the row of the latest event of a node in both roles, or -1; its own and its other node; the time since
    the former's last update; and the node's latest time, or 0.
    """
    node = nodes[i]
    row, is_dst, latest_time = latest_as_src[node], np.int64(0), np.int64(0)
    as_dst = latest_as_dst[node]
    if as_dst >= 0 and (row < 0 or times[as_dst] >= times[row]):
        row, is_dst = as_dst, np.int64(1)
    if row >= 0:
        latest_time = times[row]
    elif stand_in >= 0 and stand_in < ends[ends.shape[0] - 1]:
        row, is_dst = find_event(stand_in, ends, nodes, rows_as_src, begins_as_src, rows_as_dst, begins_as_dst)
    own, other, age = node, node, np.int64(0)
    if row >= 0:
        own, other = (dst[row], src[row]) if is_dst else (src[row], dst[row])
        age = times[row] - last_update[own]
    owns[i], others[i], chosen[i], elapsed[i], latest_times[i] = own, other, row, age, latest_time


@cpu_kernel
def choose_events_cpu(stand_in, ends, nodes, last_update, src, dst, times, rows_as_src, begins_as_src, latest_as_src,
                      rows_as_dst, begins_as_dst, latest_as_dst, owns, others, chosen, elapsed,
                      latest_times):  # fmt: skip
    """A node without events takes the event of number `stand_in` of all nodes, if there are as many; -1 is none."""
    for i in prange(nodes.shape[0]):
        choose_event(i, stand_in, ends, nodes, last_update, src, dst, times, rows_as_src, begins_as_src, latest_as_src,
                     rows_as_dst, begins_as_dst, latest_as_dst, owns, others, chosen, elapsed,
                     latest_times)  # fmt: skip


@gpu_kernel("i8 i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[]")
def choose_events_gpu(stand_in, ends, nodes, last_update, src, dst, times, rows_as_src, begins_as_src, latest_as_src,
                      rows_as_dst, begins_as_dst, latest_as_dst, owns, others, chosen, elapsed,
                      latest_times):  # fmt: skip
    for i in range(cuda.blockIdx.x * THREADS + cuda.threadIdx.x, nodes.shape[0], cuda.gridDim.x * THREADS):
        choose_event(np.int64(i), stand_in, ends, nodes, last_update, src, dst, times, rows_as_src, begins_as_src,
                     latest_as_src, rows_as_dst, begins_as_dst, latest_as_dst, owns, others, chosen, elapsed,
                     latest_times)  # fmt: skip
