"""Numbers of an array in a file, of which pages are in memory: the pages that are needed, and the numbers in them."""

from __future__ import annotations

from pyg_direct.compiler.jit import cpu_sequence


@cpu_sequence
def list_pages_cpu(positions, lead, per_page, tick, ticks, found):
    """List each page that holds one of these positions once; returns their number.

    Position 0 is number `lead` of the first page. `ticks` marks the pages of this call by `tick`.
    """
    count = 0
    for i in range(positions.shape[0]):
        page = (lead + positions[i]) // per_page
        if ticks[page] != tick:
            ticks[page] = tick
            found[count] = page
            count += 1
    return count


@cpu_sequence
def take_numbers_cpu(positions, left, lead, per_page, slots, memory, out):
    """Read the numbers at `positions[left[...]]` whose pages are in memory; the others stay in `left`.

    Returns how many stay. `slots` has the slot of each page, -1 for none; `memory` holds slots of `per_page` numbers.
    """
    count = 0
    for j in range(left.shape[0]):
        i = left[j]
        place = lead + positions[i]
        slot = slots[place // per_page]
        if slot < 0:
            left[count] = i
            count += 1
        else:
            out[i] = memory[slot * per_page + place % per_page]
    return count
