"""Prefetch of Python's objects, and of memory that they lead to, before Python reads them one by one."""

from __future__ import annotations

from pyg_direct.compiler.jit import cpu_sequence, prefetch, read_word

# Words at the beginning of a tensor's memory, of which one leads to its number of writes.
_FIRST, _END = 2, 8
_WORD = 8


@cpu_sequence
def prefetch_objects_cpu(addresses, offset):
    """Ask for what objects lead to, in three passes, so that the reads of all objects wait at the same time.

    Args:
        addresses: int64 `[n]`, of live objects.
        offset: Bytes from an object to the address of its tensor's memory.
    """
    for i in range(addresses.shape[0]):
        prefetch(addresses[i] + offset)
    for i in range(addresses.shape[0]):
        prefetch(read_word(addresses[i] + offset))
    for i in range(addresses.shape[0]):
        tensor = read_word(addresses[i] + offset)
        for word in range(_FIRST, _END):
            prefetch(read_word(tensor + word * _WORD))
