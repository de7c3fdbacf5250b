"""Last stage of a captured batch that has the edges among all its nodes instead of the edges of its hops.

The stage is one more hop, which expands the nodes of all hops. Its work list has an entry for each (entry of a hop,
hop). So relations stand in order, and the nodes of a relation in the order of their local ids. The edges of the stage
replace the edges of the hops. Sources become local ids, or -1 if they are no nodes of the batch. `order`, int64, lists
the positions of the other edges, in the order of the items; `state[NUM_INSIDE]` is their number.

Nodes are found in the way that the hops numbered them: by `seen` and `places`, or in the buckets of their trees.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cuda, gpu_kernel
from pyg_direct.kernels.batch_counters import EDGES, HEADER, NUM_INSIDE
from pyg_direct.kernels.binary_search import first_not_below
from pyg_direct.kernels.local_ids.bitmap import has_bit
from pyg_direct.kernels.local_ids.sorted_buckets import find_node
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block, sum_before, sum_block
from pyg_direct.kernels.sampling import worklist
from pyg_direct.kernels.sampling.captured_hops import (
    close_nodes,
    find_key,
    leave_sizes,
    list_entries,
    place_all_outputs,
)
from pyg_direct.kernels.sampling.worklist import COLUMNS

_FIRST = worklist.FIRST


@gpu_kernel("i8[] i8[] i8 i8 i8 i8 i8 i8[] i8[] i8[] i8 i8[] i8[] i8[] i8[] i8[]")
def list_all_nodes_gpu(state, inbox, num_hops, num_batches, num_types, capacity, repeats, nodes, class_starts,
                       bucket_starts, bucket_step, template, work, begins, totals, first_trees):  # fmt: skip
    """Close the nodes of the last hop, and list the work of the stage; one block.

    `template` holds the known columns of the entries of a hop, int64 `[A * COLUMNS]`; see `list_entries`.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    tid, num_classes = np.int64(cuda.threadIdx.x), num_batches * num_types
    close_nodes(state, num_hops, num_classes, inbox, num_batches, repeats, nodes, class_starts, bucket_starts,
                bucket_step, begins, totals)  # fmt: skip
    c = tid
    while c < num_classes:
        first_trees[c] = inbox[HEADER + num_batches + num_classes + 1 + c]
        c += THREADS
    list_entries(state, inbox, 0, num_hops + 1, num_batches, num_types, capacity, template, 0, work, begins, totals,
                 shared)  # fmt: skip


@body
def find_local(state, num_hops, num_classes, range_bits, tree_bits, tree_shift, bucket_shift, num_buckets, seen, ranks,
               places, first_trees, new_starts, begins, totals, nodes, keys, item):  # fmt: skip
    """Local id of an identity; -1 if it is no node of the batch."""
    if num_buckets > 0:
        return find_node(state, num_hops, num_classes, num_buckets, range_bits, tree_bits, tree_shift, bucket_shift,
                         first_trees, new_starts, begins, totals, nodes, keys, item)  # fmt: skip
    # The table keeps the local ids of nodes of earlier batches.
    return -1 - np.int64(places[find_key(seen, ranks, item)]) if has_bit(seen, item) else np.int64(-1)


@gpu_kernel("i8[] i8 i8 i8 i8 i8 i8 i8 u4[] i4[] i4[] i8[] i8[] i8[] i8[] i8[] u4[] i8[] i8[]")
def localize_inside_gpu(state, num_hops, num_classes, range_bits, tree_bits, tree_shift, bucket_shift, num_buckets,
                        seen, ranks, places, first_trees, new_starts, begins, totals, nodes, keys, sources,
                        block_sums):  # fmt: skip
    """Sources of the stage become local ids, or -1; `block_sums` gets the number of edges inside, by block."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    begin, end = own_range(state[EDGES + 1])
    count = np.int64(0)
    e = begin + cuda.threadIdx.x
    while e < end:
        local = find_local(state, num_hops, num_classes, range_bits, tree_bits, tree_shift, bucket_shift, num_buckets,
                           seen, ranks, places, first_trees, new_starts, begins, totals, nodes, keys,
                           sources[e])  # fmt: skip
        sources[e] = local
        if local >= 0:
            count += 1
        e += THREADS
    total, _ = sum_block(count, np.int64(0), shared)
    if cuda.threadIdx.x == 0:
        block_sums[cuda.blockIdx.x] = total


@gpu_kernel("i8[] i8[] i8[] i8[]")
def order_inside_gpu(state, sources, block_sums, order):
    """List the positions of the edges inside, by a grid of the size that counted them."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    running, total = sum_before(block_sums, shared)
    begin, end = own_range(state[EDGES + 1])
    tile = begin
    while tile < end:
        e = tile + cuda.threadIdx.x
        is_inside = np.int64(0)
        if e < end and sources[e] >= 0:
            is_inside = np.int64(1)
        before, of_tile = scan_block(is_inside, shared)
        if is_inside != 0:
            order[running + before] = e
        running += of_tile
        tile += THREADS
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        state[NUM_INSIDE] = total


@gpu_kernel("i8[] i8 i8 i8[] i8[] i8[] i8[] i8[] i8[] i8[]")
def close_subgraph_gpu(state, num_hops, num_classes, work, offsets, order, firsts, totals, outputs, outbox):
    """The tables of the edges inside, the positions of all outputs, and the sizes for the host; one block."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    tid, width = np.int64(cuda.threadIdx.x), (num_hops + 1) * COLUMNS
    entries = np.int64((work.shape[0] // COLUMNS - 1) // (num_hops + 1))
    before = (num_hops + 2) * num_classes
    a = tid
    while a <= entries:
        firsts[a] = first_not_below(order, 0, state[NUM_INSIDE], offsets[work[a * width + _FIRST]])
        a += THREADS
    cuda.syncthreads()
    a = tid
    while a < entries:
        totals[before + a], totals[before + entries + a] = 0, firsts[a + 1] - firsts[a]
        a += THREADS
    cuda.syncthreads()
    place_all_outputs(totals, num_hops, 1, num_classes, entries, outputs, shared)
    leave_sizes(state, totals, outbox)
