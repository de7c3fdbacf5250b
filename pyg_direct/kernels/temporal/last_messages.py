"""Events of each node in the batch in which it came last, as one of two roles: source or destination.

A log holds the events of many batches in rows. `rows` lists the rows of a role, ascending by node within a batch;
a node's events are rows[begins[v]:ends[v]], and `latest[v]` is the row of the latest one, -1 without events. Of equal
times the last one counts.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.temporal.last_neighbors import is_last_end, is_node


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
    low, high = np.int64(0), np.int64(ends.shape[0])
    while low < high:
        middle = (low + high) >> 1
        if ends[middle] <= number:
            low = middle + 1
        else:
            high = middle
    within = number - ends[low - 1] if low > 0 else number
    if low < nodes.shape[0]:
        return rows_as_src[begins_as_src[nodes[low]] + within], np.int64(0)
    return rows_as_dst[begins_as_dst[nodes[low - nodes.shape[0]]] + within], np.int64(1)


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
