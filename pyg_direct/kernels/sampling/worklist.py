"""The work list of a hop: one item for each (relation, node to expand), relation after relation.

`work` describes it, int64 `[(A + 1) * COLUMNS]`. It has an entry for each of the A relations that have items, and one
more whose first item is the number of items. So one kernel serves any number of relations.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import body
from pyg_direct.kernels.batch_counters import RELATION_DRAW, TREE_DRAW, TYPE_DRAW
from pyg_direct.kernels.sampling.labor import labor_key
from pyg_direct.kernels.sampling.random import draw
from pyg_direct.kernels.sampling.uniform import hop_key

# Columns of an entry:
# - FIRST, RELATION, FANOUT: first item of the relation; its number; its fanout.
# - ROWS, FRONT, LOCAL: its first row in the offsets; its first node in the frontier; the local id of that node.
# - FLAGS, EDGES: sum of the flags below; its first edge.
# - SOURCE_START, SOURCE_BASE: start of the neighbors' type in the id space, and among the identities.
# - KEY, BATCH: the bits of the key of its batch; the number of the batch.
# - OWN_START, FIRST_TREE: the number that the frontier's nodes are counted from; the first tree of the batch.
FIRST, RELATION, FANOUT, ROWS, FRONT, LOCAL, FLAGS, EDGES = range(8)
SOURCE_START, SOURCE_BASE, KEY, BATCH, OWN_START, FIRST_TREE = range(8, 14)
COLUMNS = 14
# BY_PLACE: times belong to the nodes of the frontier, not to their trees.
# SHARED: rows share the keys of their sources (`labor.py`). SAME_KEYS: so do hops.
TIMED, WEIGHTED, BY_PLACE, SHARED, SAME_KEYS = 1, 2, 4, 8, 16
# With SHARED, the number of the neighbors' type stands above the flags.
TYPE_SHIFT = 8


@body
def find_record(table, width, column, value):
    """Start of the last row of a table whose column is at most `value`; the table's last row is its end."""
    low, high = 0, table.shape[0] // width - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if table[middle * width + column] <= value:
            low = middle
        else:
            high = middle
    return low * width


@body
def count_all_items(work):
    """Number of the items of a work list, the first column of its last entry."""
    return work[(work.shape[0] // COLUMNS - 1) * COLUMNS + FIRST]


@body
def find_entry(work, item):
    """Start of an item's entry in `work`."""
    return find_record(work, COLUMNS, FIRST, item)


@body
def frontier_place(work, entry, item):
    """Position of an item's node in the frontier."""
    return work[entry + FRONT] + item - work[entry + FIRST]


@body
def is_flagged(work, entry, size, replace, flags):
    """Check whether an item chooses by one of these rules; an item that takes all its edges does not."""
    fanout = work[entry + FANOUT]
    return (work[entry + FLAGS] & flags) != 0 and fanout >= 0 and (replace != 0 or fanout < size)


@body
def is_weighted(work, entry, size, replace):
    """Check whether an item chooses by weight."""
    return is_flagged(work, entry, size, replace, WEIGHTED)


@body
def is_shared(work, entry, size):
    """Check whether an item chooses by keys that rows share."""
    return is_flagged(work, entry, size, 0, SHARED)


@body
def is_chosen(work, entry, size, replace):
    """Check whether an item chooses in a kernel of its own, by weight or by shared keys."""
    return is_flagged(work, entry, size, replace, WEIGHTED | SHARED)


@body
def tree_of(trees, place):
    """The tree that a node of the frontier belongs to; 0 without disjoint trees."""
    if trees.shape[0] == 0:
        return 0
    return trees[place]


@body
def relation_key(work, entry, hop):
    """Key of the draws of a relation in a hop: relation 0 draws as a graph with one relation does."""
    own_key = hop_key(np.uint64(work[entry + KEY]), hop)
    relation = work[entry + RELATION]
    if relation > 0:
        own_key = draw(own_key, relation, RELATION_DRAW)
    return own_key


@body
def sources_key(work, entry, hop):
    """Key of the keys of sources, which all rows, relations and trees share: type 0 draws as a graph of one type."""
    flags = work[entry + FLAGS]
    own_key = labor_key(np.uint64(work[entry + KEY]), hop, flags & SAME_KEYS)
    kind = flags >> TYPE_SHIFT
    if kind > 0:
        own_key = draw(own_key, kind, TYPE_DRAW)
    return own_key


@body
def tree_key(own_key, trees, place):
    """Key of the draws of a row, from the key of its relation."""
    if trees.shape[0] > 0:
        own_key = draw(own_key, trees[place], TREE_DRAW)
    return own_key


@body
def row_key(work, entry, hop, trees, place):
    """Key of the draws of a row."""
    return tree_key(relation_key(work, entry, hop), trees, place)


@body
def identity(node, tree, tree_shift, type_start, type_base):
    """A node of a tree as one number: types, then trees, then nodes ascending.

    The parts occupy separate bits; without disjoint trees, the identity is the id of the node.
    """
    return type_base + (np.int64(tree) << np.int64(tree_shift)) + node - type_start
