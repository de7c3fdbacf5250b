"""Budgets of HGT's sampling, one for each candidate, and the choice of a layer's nodes.

On a CPU they stand in a hash table of the nodes that may be sampled, and of the sampled ones. `table` holds ids of the
id space, -1 for free slots, int64 `[S]`, S a power of two. `shares` is the budget of the node in each slot, or CHOSEN,
int64 `[S]`. `slots` are the slots in the order in which they were filled, int64.

On a GPU `met`, int64 `[M]`, lists the neighbors that layers have met, in ascending order within a layer.
`met_state[NODES + l]` is their number before layer l. `budgets`, int64 `[M]`, has their budgets. `place_of_id` has the
position of each in `met`. For a node of the batch, which has a bit in `seen`, it has the position among these nodes.

Scores become integers of 62 bits in the same order. For each type, a layer finds the largest score that it takes digit
by digit, from the highest. All blocks count the scores that begin with the digits found so far, by their next digit.
Then one block a type finds the digit.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cpu_sequence, cuda, gpu_kernel
from pyg_direct.kernels.batch_counters import BUDGET_DRAW, NODES
from pyg_direct.kernels.local_ids.bitmap import GROUP_WORDS, WORD, bit_of, has_bit
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block
from pyg_direct.kernels.sampling.random import draw
from pyg_direct.kernels.sampling.uniform import LOW_WORD, find_row
from pyg_direct.kernels.sampling.weighted import draw_unit, order_of
from pyg_direct.kernels.sampling.worklist import KEY, count_all_items, find_entry, frontier_place

# A budget is a fixed-point number, so that the order of adding does not matter.
ONE = 1 << 40
# Bits of a score as an integer.
_ORDER_BITS = 62
# (lowest bit, number of bits) of the digits of a score. Most are alike in the first, but for a few bits.
DIGITS = [(48, 14), (36, 12), (24, 12), (12, 12), (0, 12)]
if SIMULATED:
    DIGITS = [(56, 6), *((shift, 8) for shift in range(48, -1, -8))]
BINS = 1 << max(bits for _, bits in DIGITS)
# Instead of the digits found: a layer takes all nodes of a type, or none.
_TAKES_ALL, _TAKES_NONE = -1, -2

# In place of the budget of a node that is in the batch.
CHOSEN = -1
_FREE = -1
# Odd multipliers spread the halves of an id over 64 bits (Knuth, TAOCP 3, section 6.4).
_LOW_SPREAD, _HIGH_SPREAD = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77)
_HALF = np.uint64(32)


@body
def first_slot(table, item):
    """The slot that a search for a node begins at."""
    word = np.uint64(item)
    spread = np.uint64((word & LOW_WORD) * _LOW_SPREAD) ^ np.uint64((word >> _HALF) * _HIGH_SPREAD)
    return np.int64(np.uint64(spread ^ (spread >> _HALF)) >> np.uint64(8)) & (np.int64(table.shape[0]) - 1)


@body
def enter(table, item):
    """The slot of a node, which is free if the node is not in the table."""
    slot = first_slot(table, item)
    while table[slot] != _FREE and table[slot] != item:
        slot = (slot + 1) & (np.int64(table.shape[0]) - 1)
    return slot


@cpu_sequence
def choose_nodes_cpu(nodes, table, shares, slots, count):
    """Mark nodes as chosen, inserting new ones; returns the number of filled slots."""
    for i in range(nodes.shape[0]):
        slot = enter(table, nodes[i])
        if table[slot] == _FREE:
            table[slot] = nodes[i]
            slots[count] = slot
            count += 1
        shares[slot] = CHOSEN
    return count


@cpu_sequence
def add_shares_cpu(sources, targets, ends, one, table, shares, slots, count):
    """Add `one` / (neighbors that a target lists in a relation) to each of them; returns the number of filled slots.

    Relation r has the edges from ends[r] to ends[r + 1]; the edges of a target are consecutive.
    """
    for r in range(ends.shape[0] - 1):
        begin = ends[r]
        while begin < ends[r + 1]:
            end = begin + 1
            while end < ends[r + 1] and targets[end] == targets[begin]:
                end += 1
            share = one // (end - begin)
            for e in range(begin, end):
                slot = enter(table, sources[e])
                if table[slot] == _FREE:
                    table[slot] = sources[e]
                    shares[slot] = share
                    slots[count] = slot
                    count += 1
                elif shares[slot] != CHOSEN:
                    shares[slot] += share
            begin = end
    return count


@cpu_sequence
def list_budgets_cpu(table, shares, slots, ids, budgets):
    """List the nodes that may be sampled, and their budgets; returns their number."""
    count = 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if shares[slot] != CHOSEN:
            ids[count], budgets[count] = table[slot], shares[slot]
            count += 1
    return count


@cpu_sequence
def keep_inside_cpu(nodes, places, sources, targets, edge_ids, ends, table, place_of_slot, rows, columns, ids, kept):
    """Keep the edges whose sources are nodes of the batch, by their positions; kept[r] of relation r.

    A node that occurs twice counts at its first position. `place_of_slot` holds -1, int32 `[S]`.
    """
    for i in range(nodes.shape[0] - 1, -1, -1):
        place_of_slot[enter(table, nodes[i])] = places[i]
    count = 0
    for r in range(ends.shape[0] - 1):
        before = count
        for e in range(ends[r], ends[r + 1]):
            place = place_of_slot[enter(table, sources[e])]
            if place >= 0:
                rows[count], columns[count], ids[count] = place, targets[e], edge_ids[e]
                count += 1
        kept[r] = count - before
    return count


@gpu_kernel("i8[] i8[] u4[]")
def mark_seeds_met_gpu(state, nodes, met_bits):
    """Set the bits of the seeds, which are no candidates."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < state[NODES]:
        cuda.atomic.or_(met_bits, nodes[i] >> 5, bit_of(nodes[i]))
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] i8[] i8[] u4[] i4[] i8[]")
def add_shares_gpu(work, offsets, sources, nodes, seen, place_of_id, budgets):
    """Add `ONE` / (neighbors that an item lists) to the budget of each that is not in the batch.

    A block takes a tile of items at a time, and has a thread for each of their edges.
    """
    item_offsets = cuda.shared.array(THREADS, np.int64)
    shares = cuda.shared.array(THREADS, np.int64)
    tid = np.int64(cuda.threadIdx.x)
    own_begin, own_end = own_range(count_all_items(work))
    tile = own_begin
    while tile < own_end:
        num_items = min(np.int64(THREADS), own_end - tile)
        if tid < num_items:
            item = tile + tid
            place, count = frontier_place(work, find_entry(work, item), item), offsets[item + 1] - offsets[item]
            item_offsets[tid], shares[tid] = offsets[item], 0
            # A repeated seed brings its neighbors nothing more.
            if count > 0 and place_of_id[nodes[place]] == place:
                shares[tid] = ONE // count
        cuda.syncthreads()
        end = offsets[tile + num_items]
        e = offsets[tile] + tid
        while e < end:
            share, source = shares[find_row(item_offsets, num_items, e)], sources[e]
            if share > 0 and not has_bit(seen, source):
                cuda.atomic.add(budgets, place_of_id[source], share)
            e += THREADS
        cuda.syncthreads()
        tile += THREADS


@body
def order_of_budget(layer_key, node, budget):
    """The score of a node, -log(uniform) / square of its budget, as an integer: the least are chosen."""
    own = np.float64(budget) / np.float64(ONE)
    return order_of(-math.log(draw_unit(layer_key, node, 0)) / (own * own))


@gpu_kernel("i8[] i8[] i8 i8 i8 i8 i8[] i8[] u4[] i8[] i8[] i8[] i4[]")
def count_digits_gpu(met_state, work, layer, shift, bits, num_types, met, budgets, seen, type_starts, prefixes, orders,
                     counts):  # fmt: skip
    """counts[t * BINS + d]: scores of type t that begin with the digits found so far and then d.

    With the first digit `orders` gets all scores, and -1 for nodes of the batch.
    """
    layer_key = draw(np.uint64(work[KEY]), layer, BUDGET_DRAW)
    is_first = shift + bits == _ORDER_BITS
    end = met_state[NODES + layer + 1]
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < end:
        if is_first:
            orders[i] = np.int64(-1) if has_bit(seen, met[i]) else order_of_budget(layer_key, met[i], budgets[i])
        order = orders[i]
        if order >= 0:
            kind = np.int64(find_row(type_starts, num_types, met[i]))
            if is_first or order >> (shift + bits) == prefixes[kind]:
                digit = (order >> shift) & ((np.int64(1) << bits) - 1)
                cuda.atomic.add(counts, kind * BINS + digit, 1)
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8 i8 i8 i8[] i8[] i8[] i8[] i4[]")
def find_digits_gpu(is_first, bits, num_types, wanted, prefixes, left, equal, counts):
    """The next digit of the largest score that each type takes; a block takes a type at a time, and clears its counts.

    `wanted`, int64 `[T]`, is the number of nodes to take. `equal` gets the number of scores that begin with the digits
    found, and `left` the number to take of them.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    found = cuda.shared.array(3, np.int64)
    tid = np.int64(cuda.threadIdx.x)
    kind = np.int64(cuda.blockIdx.x)
    while kind < num_types:
        prefix, most = np.int64(0), wanted[kind]
        if is_first == 0:
            prefix, most = prefixes[kind], left[kind]
        if prefix >= 0:
            if tid == 0:
                found[0] = -1
            running = np.int64(0)
            first = np.int64(0)
            while first < np.int64(1) << bits:
                digit = first + tid
                number = np.int64(0)
                if digit < np.int64(1) << bits:
                    number = np.int64(counts[kind * BINS + digit])
                    if number > 0:
                        counts[kind * BINS + digit] = 0
                # Equal for all threads.
                if running < most:
                    before, total = scan_block(number, shared)
                    before += running
                    if before < most and most <= before + number:
                        found[0], found[1], found[2] = digit, most - before, number
                    running += total
                first += THREADS
            cuda.syncthreads()
            if tid == 0:
                if most == 0:
                    prefixes[kind], left[kind] = _TAKES_NONE, 0
                elif found[0] < 0:
                    prefixes[kind], left[kind] = _TAKES_ALL, 0
                else:
                    prefixes[kind], left[kind], equal[kind] = (prefix << bits) + found[0], found[1], found[2]
            cuda.syncthreads()
        kind += np.int64(cuda.gridDim.x)


@gpu_kernel("i8[] i8 i8 i8[] i8[] i8[] i8[] i8[] i8[] u4[] u1[]")
def mark_chosen_gpu(met_state, layer, num_types, met, orders, type_starts, prefixes, left, equal, fresh, touched):
    """Mark the nodes that the layer takes in the bitmap `fresh`, and their groups in `touched` unless it is empty."""
    end = met_state[NODES + layer + 1]
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < end:
        order, node = orders[i], met[i]
        if order >= 0:
            kind = np.int64(find_row(type_starts, num_types, node))
            limit = prefixes[kind]
            is_taken = limit == _TAKES_ALL or order < limit
            if order == limit:
                is_taken = True
                if left[kind] < equal[kind]:
                    # Of equal scores, take the lowest ids.
                    before = np.int64(0)
                    for other in range(end):
                        if orders[other] == order and met[other] < node and met[other] >= type_starts[kind]:
                            before += 1
                    is_taken = before < left[kind]
            if is_taken:
                cuda.atomic.or_(fresh, node >> 5, bit_of(node))
                if touched.shape[0] > 0:
                    touched[node // (GROUP_WORDS * WORD)] = 1
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] i8 i8[] i8[] i8[] u4[]")
def forget_met_gpu(state, met_state, num_layers, nodes, met, budgets, met_bits):
    """Clear the bits and budgets of a batch for the next one."""
    first, step = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x, np.int64(cuda.gridDim.x) * THREADS
    i = first
    while i < state[NODES]:
        met_bits[nodes[i] >> 5] = np.uint32(0)
        i += step
    i = first
    while i < met_state[NODES + num_layers]:
        met_bits[met[i] >> 5] = np.uint32(0)
        budgets[i] = 0
        i += step
