"""Local ids of a batch's nodes, in the order of discovery, and the batch in PyG's form.

On a GPU the local id of a node stands in a table, int32 `[N]`. If the table takes too much memory, it is the rank
in the ranked bitmap of all nodes seen. On the CPU it is always the rank.

`place_ends_gpu` handles links as seeds of a captured graph: their ends, their negatives and their places in a
batch.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.batch_counters import (
    BAD_SEED,
    EDGES,
    FAR,
    HEADER,
    KEY,
    MORE_SOURCES,
    NEEDED_EDGES,
    NEGATIVE_DRAW,
    NO_POSITION,
    NODES,
    NUM_LINKS,
    NUM_SEEDS,
    SEEDS_ON_GPU,
)
from pyg_direct.kernels.binary_search import first_not_below
from pyg_direct.kernels.local_ids.bitmap import GROUP_WORDS, WORD, bit_of, rank_of
from pyg_direct.kernels.sampling.random import draw, draw_below


@body
def read_end(inbox, i, num_links, more_sources, num_nodes):
    """End `i` of the links of a batch: sources, sources of negatives, targets, then targets of negatives.

    Given ends follow the header; others are drawn under the key of the batch, as in `sampling/negative_links.py`.
    """
    end = 0
    if i >= num_links + more_sources:
        i, end = i - (num_links + more_sources), 1
    if i < num_links:
        return inbox[HEADER + end * num_links + i]
    return draw_below(draw(inbox[KEY], NEGATIVE_DRAW, end), i - num_links, 0, num_nodes)


@gpu_kernel("I[] i8[] i8 i8 i8[] f4[]", I=("i4", "i8"))
def place_ends_gpu(nodes, ends, num_seeds, num_links, places, labels):
    """Position of each end among the seeds, the first of `nodes`, ascending; labels: 1 for given links, otherwise 0."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < places.shape[0]:
        places[i] = first_not_below(nodes, 0, num_seeds, ends[i])
        if i < labels.shape[0]:
            labels[i] = np.float32(1) if i < num_links else np.float32(0)
        i += np.int64(cuda.gridDim.x) * THREADS


@cpu_kernel
def locate_nodes_cpu(nodes, num_seeds, bits, ranks, locals_of_rank, n_id):
    """locals_of_rank[rank of a node] = its local id; of a repeated seed, the first. `n_id` gets the nodes, int64."""
    for i in prange(num_seeds, nodes.shape[0]):
        locals_of_rank[rank_of(bits, ranks, nodes[i])] = i
        n_id[i] = nodes[i]
    for back in range(num_seeds):
        i = num_seeds - 1 - back
        locals_of_rank[rank_of(bits, ranks, nodes[i])] = i
        n_id[i] = nodes[i]


@body
def export_rows(begin, end, first, offsets, sources, positions, bits, ranks, locals_of_rank, edge_ids, rows, columns,
                e_id):  # fmt: skip
    """Rows [begin, end) of a hop in PyG's form."""
    for i in range(begin, end):
        for e in range(offsets[i], offsets[i + 1]):
            columns[e] = first + i
    # Long loops over edges: many cache misses in flight.
    for e in range(offsets[begin], offsets[end]):
        rows[e] = locals_of_rank[rank_of(bits, ranks, sources[e])]
    if edge_ids.shape[0] > 0:
        for e in range(offsets[begin], offsets[end]):
            e_id[e] = edge_ids[positions[e]]
    else:
        for e in range(offsets[begin], offsets[end]):
            e_id[e] = positions[e]


@cpu_kernel
def export_hop_cpu(
    first, offsets, sources, positions, bits, ranks, locals_of_rank, edge_ids, chunks, rows, columns, e_id
):
    """A hop in PyG's form; its rows are the local ids first, first + 1, ..."""
    share = (offsets.shape[0] - 1 + chunks - 1) // chunks
    for c in prange(chunks):
        begin, end = min(c * share, offsets.shape[0] - 1), min((c + 1) * share, offsets.shape[0] - 1)
        # A function: loops over arrays compile to faster code outside the parallel one.
        export_rows(begin, end, first, offsets, sources, positions, bits, ranks, locals_of_rank, edge_ids, rows,
                    columns, e_id)  # fmt: skip


@gpu_kernel("i8[] i8[] i8[] u4[] i4[] I[] i8", I=("i4", "i8"))
def load_seeds_gpu(state, inbox, arrived, seen, local_of_node, nodes, num_nodes):
    """Seeds become the first nodes; a seed outside the graph is recorded and read as node 0.

    They lie in `arrived`, or after the header of the inbox, which may be page-locked memory of the host.
    """
    count, on_gpu = inbox[NUM_SEEDS], inbox[SEEDS_ON_GPU]
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if i == 0:
        state[KEY] = inbox[KEY]
        state[NUM_SEEDS] = count
        state[NODES] = count
        state[EDGES] = 0
    while i < count:
        node = arrived[i] if on_gpu != 0 else inbox[HEADER + i]
        if node < 0 or node >= num_nodes:
            cuda.atomic.min(state, BAD_SEED, i)
            node = np.int64(0)
        nodes[i] = node
        cuda.atomic.or_(seen, node >> 5, bit_of(node))
        if local_of_node.shape[0] > 0:
            # The first of repeated seeds wins: `count_picks_gpu` takes the minimum.
            local_of_node[node] = FAR
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] i8[] u4[] u1[] i8")
def mark_seeds_gpu(state, inbox, arrived, fresh, touched, num_nodes):
    """Mark the seeds, which may repeat, to be numbered as the nodes of a hop are: unique and ascending.

    If they are the ends of links, these are left in `arrived`.
    """
    count, on_gpu = inbox[NUM_SEEDS], inbox[SEEDS_ON_GPU]
    num_links, more_sources = inbox[NUM_LINKS], inbox[MORE_SOURCES]
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if i == 0:
        state[KEY] = inbox[KEY]
        state[NUM_SEEDS] = count
        state[EDGES] = 0
    while i < count:
        if num_links > 0:
            node = read_end(inbox, i, num_links, more_sources, num_nodes)
            arrived[i] = node
        else:
            node = arrived[i] if on_gpu != 0 else inbox[HEADER + i]
        if node < 0 or node >= num_nodes:
            cuda.atomic.min(state, BAD_SEED, i)
            node = np.int64(0)
        cuda.atomic.or_(fresh, node >> 5, bit_of(node))
        if touched.shape[0] > 0:
            touched[node // (GROUP_WORDS * WORD)] = 1
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 I[] u4[] i4[] i4[]", I=("i4", "i8"))
def locate_nodes_gpu(state, hops, nodes, bits, ranks, locals_of_rank):
    """As on the CPU; `locals_of_rank` holds large numbers before."""
    num_seeds, num_nodes = state[NUM_SEEDS], state[NODES + hops]
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < num_nodes:
        rank = rank_of(bits, ranks, nodes[i])
        if i < num_seeds:
            cuda.atomic.min(locals_of_rank, rank, np.int32(i))
        else:
            locals_of_rank[rank] = i
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 I[] u4[] i4[] i4[] i4[] I[] i8[]", I=("i4", "i8"))
def localize_sources_gpu(state, hops, nodes, seen, ranks, locals_of_rank, local_of_node, sources, outbox):
    """Sources become local ids, `seen` is cleared, and the sizes go to the host; the last kernel of a batch.

    Local ids come from a table by node, or from the ranked bitmap if there is no table.
    """
    num_nodes, num_edges = state[NODES + hops], state[EDGES + hops]
    first = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    step = np.int64(cuda.gridDim.x) * THREADS
    e = first
    if local_of_node.shape[0] > 0:
        while e < num_edges:
            sources[e] = local_of_node[np.uint64(sources[e])]
            e += step
        i = first
        while i < num_nodes:
            seen[nodes[i] >> 5] = np.uint32(0)
            i += step
    else:
        while e < num_edges:
            sources[e] = locals_of_rank[rank_of(seen, ranks, sources[e])]
            e += step
    if cuda.blockIdx.x == 0:
        w = np.int64(cuda.threadIdx.x)
        while w < outbox.shape[0]:
            outbox[w] = state[w]
            if w == BAD_SEED:
                state[w] = NO_POSITION
            elif w == NEEDED_EDGES:
                state[w] = 0
            w += THREADS


@gpu_kernel("I[] i4[] P[] I[] i8[] i8[] i8[]", I=("i4", "i8"), P=("i4", "i8"))
def export_batch_gpu(sources, targets, ids, nodes, edge_index, e_id, n_id):
    """The batch in PyG's form: edge_index int64 [2 * E'] (local), e_id int64 [E'], n_id int64 [M]."""
    first = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    step = np.int64(cuda.gridDim.x) * THREADS
    num_edges = e_id.shape[0]
    e = first
    while e < num_edges:
        at = np.uint64(e)
        source, target, own_id = sources[at], targets[at], ids[at]
        edge_index[at] = source
        edge_index[np.uint64(num_edges + e)] = target
        e_id[at] = own_id
        e += step
    i = first
    while i < n_id.shape[0]:
        n_id[i] = nodes[i]
        i += step
