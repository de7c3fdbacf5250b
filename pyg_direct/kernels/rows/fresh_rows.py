"""Rows that a batch reads first of all batches of its window."""

from __future__ import annotations

from pyg_direct.compiler.jit import cpu_sequence


@cpu_sequence
def list_fresh_rows_cpu(ids, claims, first_batch, table, found):
    """List each row of `ids` once that no batch from `first_batch` on has claimed; returns their number.

    `claims` has the last batch that claimed each row. `table` is a hash table of rows, all -1. Its length is a power of
    two, above the number of ids. `np.unique` takes about 25 times as long.
    """
    mask, count = table.shape[0] - 1, 0
    for i in range(ids.shape[0]):
        row = ids[i]
        if claims[row] >= first_batch:
            continue
        # The middle bits of a product with the golden ratio: rows with equal steps between lie apart.
        place = (row * 0x9E3779B1 >> 8) & mask
        while table[place] >= 0 and table[place] != row:
            place = (place + 1) & mask
        if table[place] < 0:
            table[place] = row
            found[count] = row
            count += 1
    return count
