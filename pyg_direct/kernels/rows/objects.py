"""Prefetch of Python's objects, and of memory that they lead to, before Python reads them one by one."""

from __future__ import annotations

from pyg_direct.compiler.jit import cpu_sequence, prefetch, read_word

# Bytes from the begin of a counter to its number, which may lie in another cache line.
_TO_NUMBER = 16


@cpu_sequence
def prefetch_objects_cpu(addresses, to_tensor, to_counter):
    """Ask for what objects lead to, in three passes, so that the reads of all objects wait at the same time.

    Args:
        addresses: int64 `[n]`, of live objects.
        to_tensor: Bytes from an object to the address of its tensor's memory.
        to_counter: Bytes from the begin of that memory to the address of its counter of writes.
    """
    for i in range(addresses.shape[0]):
        prefetch(addresses[i] + to_tensor)
    for i in range(addresses.shape[0]):
        prefetch(read_word(addresses[i] + to_tensor) + to_counter)
    for i in range(addresses.shape[0]):
        counter = read_word(read_word(addresses[i] + to_tensor) + to_counter)
        prefetch(counter)
        prefetch(counter + _TO_NUMBER)
