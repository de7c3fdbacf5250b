"""The nodes of a hop that no earlier hop met, unique and ascending, from bitmaps: without sort or hash.

`seen` holds the nodes of earlier hops and `fresh` those met in this one; both are bitmaps, uint32 `[W]`. Over many
nodes `touched`, uint8, has a flag for each 1,024 ids, so that a scan reads only the words that were met.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.batch_counters import NODES
from pyg_direct.kernels.local_ids.bitmap import GROUP_WORDS, WORD, bit_of, count_bits, lowest_bit
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block, sum_before, sum_block
from pyg_direct.kernels.sampling.uniform import find_row

# Ids a word from which it pays to have a thread for each bit of a word instead of one for each word.
_DENSE = 3
_ONE_WORD = np.int64(1 << 32)
_LOW_HALF = np.int64(0xFFFFFFFF)


@body
def emit_word(word, index, nodes, at):
    """Write the ids of the set bits of word `index` to nodes[at:], ascending."""
    while word != np.uint32(0):
        nodes[at] = index * WORD + lowest_bit(word)
        at += 1
        word = np.uint32(word & (word - np.uint32(1)))


@body
def mark_items(items, begin, end, bits):
    """Set the bits of items [begin, end)."""
    for e in range(begin, end):
        bits[items[e] >> 5] |= bit_of(items[e])


@body
def mark_own(items, begin, end, bits, low, size):
    """Set the bits of items [begin, end) whose words are the `size` from `low` on."""
    for e in range(begin, end):
        # Without branches, which half of the items would take by chance: for another word, zero is OR-ed in.
        at = np.int64(items[e] >> 5) - low
        is_own = np.int64((at >= 0) & (at < size))
        bits[low + at * is_own] |= np.uint32(np.uint32(is_own) * bit_of(items[e]))


@cpu_kernel
def mark_fresh_cpu(items, fresh, chunks):
    """Set the bits of `items` in the bitmaps `fresh`, uint32 `[G, W]`; returns how many of them were used.

    Each bitmap is marked by a group of chunks, which share its words; a single chunk marks it alone, if there is a
    bitmap for each. For few items fewer bitmaps are used, because readers of the bits read all of them.
    """
    words = fresh.shape[1]
    used = min(fresh.shape[0], chunks, 1 + items.shape[0] // words) if words > 0 else 1
    ranges = chunks // used
    share, own = (items.shape[0] + used - 1) // used, (words + ranges - 1) // ranges
    for c in prange(used * ranges):
        begin = min((c // ranges) * share, items.shape[0])
        end, low = min(begin + share, items.shape[0]), (c % ranges) * own
        # Functions: loops over arrays compile to faster code outside the parallel one.
        if ranges == 1:
            mark_items(items, begin, end, fresh[c])
        elif low < words:
            mark_own(items, begin, end, fresh[c // ranges], low, min(own, words - low))
    return used


@body
def fold_words(begin, end, fresh, seen):
    """Merge words [begin, end) of all bitmaps into the first, without the bits of `seen`; returns their bits."""
    bits = fresh[0]
    for g in range(1, fresh.shape[0]):
        more = fresh[g]
        for w in range(begin, end):
            bits[w] |= more[w]
            more[w] = 0
    count = 0
    for w in range(begin, end):
        word = np.uint32(bits[w] & ~seen[w])
        bits[w] = word
        if word != 0:
            count += count_bits(word)
    return count


@body
def emit_words(begin, end, bits, seen, nodes, at):
    """Write the ids of words [begin, end) to nodes[at:], and move their bits to `seen`."""
    for w in range(begin, end):
        word = bits[w]
        if word != 0:
            emit_word(word, w, nodes, at)
            at += count_bits(word)
            seen[w] |= word
            bits[w] = 0


@cpu_kernel
def emit_fresh_cpu(fresh, seen, chunk_sums, nodes, begin):
    """Append the ids that the bitmaps `fresh`, uint32 `[G, W]`, hold and `seen` does not to nodes[begin:].

    Their bits move to `seen`, and `fresh` is cleared; chunk_sums gets each chunk's number.
    """
    chunks, words = chunk_sums.shape[0], seen.shape[0]
    share = (words + chunks - 1) // chunks
    for c in prange(chunks):
        chunk_sums[c] = fold_words(c * share, min((c + 1) * share, words), fresh, seen)
    for c in prange(chunks):
        at = begin
        for b in range(c):
            at += chunk_sums[b]
        emit_words(c * share, min((c + 1) * share, words), fresh[0], seen, nodes, at)


@cpu_kernel
def settle_nodes_cpu(items, begins, known, bases, chunks, rows, local_of_id):
    """Give new nodes, type after type, their local ids, and list their ids within the types.

    Type t begins at items[begins[t]], and at `bases[t]` in the id space; `known[t]` is its first new local id.
    """
    share = (items.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        begin, end = min(c * share, items.shape[0]), min((c + 1) * share, items.shape[0])
        kind = find_row(begins, known.shape[0], begin)
        for i in range(begin, end):
            while kind + 1 < known.shape[0] and begins[kind + 1] <= i:
                kind += 1
            rows[i], local_of_id[items[i]] = items[i] - bases[kind], known[kind] + i - begins[kind]


@gpu_kernel("I[] u4[]", I=("i4", "i8"))
def mark_fresh_gpu(items, fresh):
    """Set the bits of `items`."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < items.shape[0]:
        cuda.atomic.or_(fresh, items[i] >> 5, bit_of(items[i]))
        i += np.int64(cuda.gridDim.x) * THREADS


@body
def own_groups(num_words):
    """[begin, end): the groups of words that belong to this block."""
    return own_range((num_words + GROUP_WORDS - 1) // GROUP_WORDS)


@body
def list_groups(touched, chunk, num_groups, clear, listed, shared):
    """Number of the groups chunk, chunk + 1, ... that were touched (all without flags); `listed` gets their numbers,
    from 0.
    """
    tid = np.int64(cuda.threadIdx.x)
    if touched.shape[0] == 0:
        cuda.syncthreads()
        listed[tid] = tid
        cuda.syncthreads()
        return num_groups
    is_touched = np.int64(0)
    if tid < num_groups and touched[chunk + tid] != 0:
        is_touched = np.int64(1)
        if clear:
            touched[chunk + tid] = 0
    before, total = scan_block(is_touched, shared)
    if is_touched != 0:
        listed[before] = tid
    cuda.syncthreads()
    return total


@gpu_kernel("u4[] u4[] u1[] i8[]")
def count_fresh_gpu(fresh, seen, touched, block_sums):
    """Number of ids in each block's groups that are fresh and not seen."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    listed = cuda.shared.array(THREADS, np.int32)
    begin, end = own_groups(np.int64(fresh.shape[0]))
    count = np.int64(0)
    if touched.shape[0] == 0:
        w = begin * GROUP_WORDS + cuda.threadIdx.x
        stop = min(end * GROUP_WORDS, np.int64(fresh.shape[0]))
        while w < stop:
            count += cuda.popc(np.uint32(fresh[w] & ~seen[w]))
            w += THREADS
        begin = end
    chunk = begin
    while chunk < end:
        num_groups = list_groups(touched, chunk, min(np.int64(THREADS), end - chunk), False, listed, shared)
        i = np.int64(cuda.threadIdx.x)
        while i < num_groups * GROUP_WORDS:
            w = (chunk + listed[i // GROUP_WORDS]) * GROUP_WORDS + i % GROUP_WORDS
            if w < fresh.shape[0]:
                count += cuda.popc(np.uint32(fresh[w] & ~seen[w]))
            i += THREADS
        chunk += THREADS
    total, _ = sum_block(count, np.int64(0), shared)
    if cuda.threadIdx.x == 0:
        block_sums[cuda.blockIdx.x] = total


@body
def read_word(fresh, seen, w):
    """(fresh bits, seen bits) of word `w`; none beyond the end."""
    if w >= fresh.shape[0]:
        return np.uint32(0), np.uint32(0)
    return fresh[w], seen[w]


@body
def take_word(fresh, seen, w, marked, known):
    """The bits of word `w` that are fresh and not seen; they move to `seen`."""
    word = np.uint32(marked & ~known)
    if marked != np.uint32(0):
        fresh[w] = np.uint32(0)
    if word != np.uint32(0):
        seen[w] = np.uint32(known | word)
    return word


@body
def write_word(word, w, at, local_of_node, nodes):
    """Write the ids of `word` to nodes[at:] and their local ids to the table, if there is one; returns the end."""
    while word != np.uint32(0):
        node = w * WORD + cuda.ffs(word) - 1
        nodes[at] = node
        if local_of_node.shape[0] > 0:
            local_of_node[node] = at
        at += 1
        word = np.uint32(word & np.uint32(word - np.uint32(1)))
    return at


@gpu_kernel("i8[] i8 i8 u4[] u4[] u1[] i8[] i4[] I[]", I=("i4", "i8"))
def emit_fresh_gpu(state, hop, quads, fresh, seen, touched, block_sums, local_of_node, nodes):
    """Append the fresh ids that were not seen as nodes of hop `hop + 1`; their bits move to `seen`.

    A block takes a tile of words at a time, one a thread. Over so many nodes that reading the bitmap takes longest, a
    thread takes four (`quads`). If words hold many ids each, a tile packs them and has a thread for each bit.
    Neighboring threads then write side by side.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    listed = cuda.shared.array(THREADS, np.int32)
    words = cuda.shared.array(THREADS, np.uint32)
    indices = cuda.shared.array(THREADS, np.int64)
    places = cuda.shared.array(THREADS, np.int64)
    tid = np.int64(cuda.threadIdx.x)
    before, total = sum_before(block_sums, shared)
    running = state[NODES + hop]
    if cuda.blockIdx.x == 0 and tid == 0:
        state[NODES + hop + 1] = running + total
    running += before
    first = 4 * tid if quads else tid
    begin, end = own_groups(np.int64(fresh.shape[0]))
    chunk = begin
    while chunk < end:
        num_groups = list_groups(touched, chunk, min(np.int64(THREADS), end - chunk), True, listed, shared)
        tile = np.int64(0)
        while tile < num_groups * GROUP_WORDS:
            w = np.int64(fresh.shape[0])
            if tile + first < num_groups * GROUP_WORDS:
                group = chunk + listed[(tile + first) // GROUP_WORDS]
                w = group * GROUP_WORDS + (tile + first) % GROUP_WORDS
            marked, known = read_word(fresh, seen, w)
            word_1, word_2, word_3 = np.uint32(0), np.uint32(0), np.uint32(0)
            if quads:
                # All reads first, so that they are in flight together.
                marked_1, known_1 = read_word(fresh, seen, w + 1)
                marked_2, known_2 = read_word(fresh, seen, w + 2)
                marked_3, known_3 = read_word(fresh, seen, w + 3)
                word_1 = take_word(fresh, seen, w + 1, marked_1, known_1)
                word_2 = take_word(fresh, seen, w + 2, marked_2, known_2)
                word_3 = take_word(fresh, seen, w + 3, marked_3, known_3)
            word = take_word(fresh, seen, w, marked, known)
            packed = np.int64(cuda.popc(word) + cuda.popc(word_1) + cuda.popc(word_2) + cuda.popc(word_3))
            if word != np.uint32(0):
                packed += _ONE_WORD
            before, total = scan_block(packed, shared)
            num_ids, num_packed = total & _LOW_HALF, total >> 32
            at = running + (before & _LOW_HALF)
            if quads or num_ids < _DENSE * num_packed:
                at = write_word(word, w, at, local_of_node, nodes)
                at = write_word(word_1, w + 1, at, local_of_node, nodes)
                at = write_word(word_2, w + 2, at, local_of_node, nodes)
                write_word(word_3, w + 3, at, local_of_node, nodes)
            else:
                if word != np.uint32(0):
                    words[before >> 32], indices[before >> 32], places[before >> 32] = word, w, at
                cuda.syncthreads()
                item = tid
                while item < num_packed * WORD:
                    source, bit = item >> 5, np.uint32(item & 31)
                    word = words[source]
                    if (word >> bit) & np.uint32(1) != np.uint32(0):
                        below = np.uint32(word & np.uint32(np.uint32(np.uint32(1) << bit) - np.uint32(1)))
                        node, local = indices[source] * WORD + np.int64(bit), places[source] + cuda.popc(below)
                        nodes[local] = node
                        if local_of_node.shape[0] > 0:
                            local_of_node[node] = local
                    item += THREADS
            running += num_ids
            tile += 4 * THREADS if quads else THREADS
        chunk += THREADS
