"""Relabelling by ranked bitmap: new nodes of a hop come out unique, ascending and numbered, without sort or hash.

`seen` holds the nodes of earlier hops, `fresh` those met first in this hop; both are bitmaps, uint32 `[W]`.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.bitmap import WORD, bit_of, count_bits, has_bit, rank_of
from pyg_direct.kernels.block import SCAN_WORDS, own_range, scan_block, sum_before
from pyg_direct.kernels.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.state import BAD_SEED, EDGES, NODES, NUM_SEEDS


@body
def emit_word(word, index, nodes, at):
    """Write the ids of the set bits of word `index` to nodes[at:], ascending."""
    while word != np.uint32(0):
        lowest = np.uint32(word & (~word + np.uint32(1)))
        nodes[at] = index * WORD + count_bits(np.uint32(lowest - np.uint32(1)))
        at += 1
        word = np.uint32(word ^ lowest)


@cpu_kernel
def mark_fresh_cpu(items, seen, fresh, chunks):
    """Set in `fresh` the bits of `items` that `seen` does not hold; each chunk owns a range of words."""
    share = (fresh.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        low = min(c * share, fresh.shape[0])
        size = min(share, fresh.shape[0] - low)
        if size > 0:
            for e in range(items.shape[0]):
                # Without branches, which half of the items would take by chance: a word of others ors nothing in.
                at = np.int64(items[e] >> 5) - low
                is_own = np.int64((at >= 0) & (at < size))
                word = low + at * is_own
                fresh[word] |= np.uint32(np.uint32(is_own) * bit_of(items[e])) & ~seen[word]


@cpu_kernel
def emit_fresh_cpu(fresh, seen, chunk_sums, nodes, begin):
    """Append the fresh ids to nodes[begin:], move their bits to `seen`; chunk_sums gets each chunk's number."""
    chunks = chunk_sums.shape[0]
    share = (fresh.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        count = 0
        for w in range(c * share, min((c + 1) * share, fresh.shape[0])):
            if fresh[w] != 0:
                count += count_bits(fresh[w])
        chunk_sums[c] = count
    for c in prange(chunks):
        at = begin
        for b in range(c):
            at += chunk_sums[b]
        for w in range(c * share, min((c + 1) * share, fresh.shape[0])):
            if fresh[w] != 0:
                emit_word(fresh[w], w, nodes, at)
                at += count_bits(fresh[w])
                seen[w] |= fresh[w]
                fresh[w] = 0


@cpu_kernel
def locate_nodes_cpu(nodes, num_seeds, bits, ranks, locals_of_rank):
    """locals_of_rank[rank of a node] = its local id; of a repeated seed, the first."""
    for i in prange(num_seeds, nodes.shape[0]):
        locals_of_rank[rank_of(bits, ranks, nodes[i])] = i
    for back in range(num_seeds):
        i = num_seeds - 1 - back
        locals_of_rank[rank_of(bits, ranks, nodes[i])] = i


@cpu_kernel
def look_up_cpu(items, bits, ranks, locals_of_rank, out):
    for i in prange(items.shape[0]):
        out[i] = locals_of_rank[rank_of(bits, ranks, items[i])]


@cpu_kernel
def export_hop_cpu(
    first, offsets, sources, positions, bits, ranks, locals_of_rank, edge_ids, chunks, rows, columns, e_id
):
    """A hop in PyG's form; its rows are the local ids first, first + 1, ..."""
    share = (offsets.shape[0] - 1 + chunks - 1) // chunks
    for c in prange(chunks):
        begin, end = min(c * share, offsets.shape[0] - 1), min((c + 1) * share, offsets.shape[0] - 1)
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


@gpu_kernel("i8[] i8[] u4[] I[] i8", I=("i4", "i8"))
def load_seeds_gpu(state, seeds, seen, nodes, num_nodes):
    """Seeds become the first nodes; one outside the graph is remembered and reads as node 0."""
    count = state[NUM_SEEDS]
    for i in range(cuda.blockIdx.x * THREADS + cuda.threadIdx.x, count, cuda.gridDim.x * THREADS):
        node = seeds[i]
        if node < 0 or node >= num_nodes:
            cuda.atomic.min(state, BAD_SEED, np.int64(i))
            node = np.int64(0)
        nodes[i] = node
        cuda.atomic.or_(seen, node >> 5, bit_of(node))
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        state[NODES] = count
        state[EDGES] = 0


@gpu_kernel("I[] u4[] u4[]", I=("i4", "i8"))
def mark_fresh_gpu(items, seen, fresh):
    for e in range(cuda.blockIdx.x * THREADS + cuda.threadIdx.x, items.shape[0], cuda.gridDim.x * THREADS):
        item = items[e]
        if not has_bit(seen, item) and not has_bit(fresh, item):
            cuda.atomic.or_(fresh, item >> 5, bit_of(item))


@gpu_kernel("i8[] i8 u4[] u4[] i8[] I[]", I=("i4", "i8"))
def emit_fresh_gpu(state, hop, fresh, seen, block_sums, nodes):
    """Append the fresh ids as nodes of hop `hop + 1` and move their bits to `seen`."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    before, total = sum_before(block_sums, shared)
    base = state[NODES + hop]
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        state[NODES + hop + 1] = base + total
    begin, end = own_range(np.int64(fresh.shape[0]))
    running = base + before
    for tile in range(begin, end, THREADS):
        w = tile + cuda.threadIdx.x
        word = fresh[w] if w < end else np.uint32(0)
        before, total = scan_block(np.int64(count_bits(word)), shared)
        if word != np.uint32(0):
            emit_word(word, w, nodes, running + before)
            seen[w] |= word
            fresh[w] = np.uint32(0)
        running += total


@gpu_kernel("i8[] i8 I[] u4[] i4[] i4[]", I=("i4", "i8"))
def locate_nodes_gpu(state, hops, nodes, bits, ranks, locals_of_rank):
    """As on the CPU; `locals_of_rank` holds large numbers before."""
    num_seeds = state[NUM_SEEDS]
    for i in range(cuda.blockIdx.x * THREADS + cuda.threadIdx.x, state[NODES + hops], cuda.gridDim.x * THREADS):
        rank = rank_of(bits, ranks, nodes[i])
        if i < num_seeds:
            cuda.atomic.min(locals_of_rank, rank, np.int32(i))
        else:
            locals_of_rank[rank] = i


@gpu_kernel("I[] u4[] i4[] i4[] i8[]", I=("i4", "i8"))
def look_up_gpu(items, bits, ranks, locals_of_rank, out):
    for i in range(cuda.blockIdx.x * THREADS + cuda.threadIdx.x, out.shape[0], cuda.gridDim.x * THREADS):
        out[i] = locals_of_rank[rank_of(bits, ranks, items[i])]


@gpu_kernel("I[] i8[] i4[] I[] u4[] i4[] i4[] P[] i8[] i8[] i8[]", I=("i4", "i8"), P=("i4", "i8"))
def export_batch_gpu(sources, positions, targets, nodes, bits, ranks, locals_of_rank, edge_ids,
                     edge_index, e_id, n_id):  # fmt: skip
    """The batch in PyG's form: edge_index int64 [2 * E'] (local), e_id int64 [E'], n_id int64 [M]."""
    first = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    step = cuda.gridDim.x * THREADS
    num_edges = e_id.shape[0]
    for e in range(first, num_edges, step):
        edge_index[e] = locals_of_rank[rank_of(bits, ranks, sources[e])]
        edge_index[num_edges + e] = targets[e]
        position = positions[e]
        if edge_ids.shape[0] > 0:
            e_id[e] = edge_ids[position]
        else:
            e_id[e] = position
    for i in range(first, n_id.shape[0], step):
        n_id[i] = nodes[i]
