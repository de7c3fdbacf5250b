"""Budgets of HGT's sampling on a CPU: a hash table of the nodes that may be sampled, and of the sampled ones.

`table` holds ids of the id space, -1 for free slots, int64 `[S]`, S a power of two. `shares` is the budget of the node
in each slot, or CHOSEN, int64 `[S]`. `slots` are the slots in the order in which they were filled, int64. On a GPU
`sampling/hgt_sampling.py` sorts instead.
"""

from __future__ import annotations

from pyg_direct.compiler.jit import body, cpu_sequence
from pyg_direct.kernels.local_ids.hash_table import slot_at

# In place of the budget of a node that is in the batch.
CHOSEN = -1
_FREE = -1


@body
def enter(table, item):
    """The slot of a node, which is free if the node is not in the table."""
    attempt = 0
    slot = slot_at(table, table.shape[0], 0, 0, item, attempt)
    while table[slot] != _FREE and table[slot] != item:
        attempt += 1
        slot = slot_at(table, table.shape[0], 0, 0, item, attempt)
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
