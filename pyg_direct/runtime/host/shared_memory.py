"""Host memory that several processes see: it has no name, and is freed when its last user is gone.

Its size is bounded by the memory of the host, not by `/dev/shm`. However processes end, no memory leaks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, MemoryLimitError
from pyg_direct.progress import show_wait
from pyg_direct.runtime.cuda.device import bind_thread, call
from pyg_direct.runtime.cuda.memory import Block, fill

_PORTABLE, _MAPPED = 0x01, 0x02


class _Map(mmap.mmap):
    """A mapping with the descriptor it was made of; tensors over it keep it."""

    descriptor: int

    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        # Names are passed in: at interpreter exit, names of modules are gone before objects are.
        with suppress(OSError, AttributeError):
            os.close(self.descriptor)


_KNOWN: weakref.WeakValueDictionary[int, _Map] = weakref.WeakValueDictionary()
# One object for each memory, so that memory that is pickled twice at once is sent once.
_OBJECTS: weakref.WeakValueDictionary[int, SharedMemory] = weakref.WeakValueDictionary()
# Memory that is page-locked here, which the driver refuses to lock twice.
_PINNED: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()


class SharedMemory:
    """A piece of host memory, sent to other processes by pickling it for them.

    It can be sent while `spawn` starts a process, and later through queues and pipes of `multiprocessing`. A pickle can
    be read once, while the sender lives; memory that was read stays whole even if the sender ends.

    Args:
        descriptor: A file descriptor of memory that another process made; it is closed in time.
    """

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        if num_bytes < 0:
            raise ArgumentError(f"num_bytes must be at least 0, got {num_bytes}")
        self.num_bytes = num_bytes
        is_new = descriptor is None
        descriptor = _open_nameless() if descriptor is None else descriptor
        try:
            if is_new:
                os.ftruncate(descriptor, max(num_bytes, 1))
            self._map = _Map(descriptor, max(num_bytes, 1))
        except (OSError, OverflowError, ValueError) as error:
            os.close(descriptor)
            raise MemoryLimitError(f"num_bytes must fit host memory, got {num_bytes}: {error}") from error
        self._map.descriptor = descriptor
        address = self.bytes.data_ptr()
        _KNOWN[address], _OBJECTS[address] = self._map, self

    @property
    def descriptor(self) -> int:
        """The file descriptor of it, open as long as this object or a view lives."""
        return self._map.descriptor

    @property
    def bytes(self) -> Tensor:
        """All of it, uint8 `[num_bytes]`."""
        return torch.frombuffer(self._map, dtype=torch.uint8)[: self.num_bytes]

    def view(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return a CPU tensor over the first bytes."""
        count = torch.Size(shape).numel()
        if count * dtype.itemsize > self.num_bytes:
            raise ArgumentError(f"shape must fit the {self.num_bytes} bytes, got {tuple(shape)} of {dtype}")
        return self.bytes[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    def __reduce__(self) -> Any:
        if not hasattr(reduction, "DupFd"):
            raise ArgumentTypeError("memory of the host can be sent to other processes on Linux and macOS only")
        return _open_sent, (reduction.DupFd(self._map.descriptor), self.num_bytes)


def _open_nameless() -> int:
    """Open a file that no folder lists: in memory, or on a disk if the system has no such memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pyg_direct", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _open_sent(descriptor: Any, num_bytes: int) -> SharedMemory:
    return SharedMemory(num_bytes, descriptor.detach())


def open_shared(process: int, descriptor: int, num_bytes: int) -> SharedMemory:
    """Open memory of another process of this host and user, which waits meanwhile.

    Args:
        process, descriptor, num_bytes: Number of the process, and its description of the memory.
    """
    found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(found).st_size < num_bytes:
        os.close(found)
        raise OSError(f"memory of process {process} must have {num_bytes} bytes, it has fewer")
    return SharedMemory(num_bytes, found)


def find_shared(tensor: Tensor) -> SharedMemory | None:
    """Return the shared memory whose first bytes a CPU tensor is a view of, if there is one."""
    if tensor.is_cuda or not tensor.is_contiguous():
        return None
    address = tensor.data_ptr()
    known = _KNOWN.get(address)
    if known is None:
        return None
    memory = _OBJECTS.get(address)
    if memory is None:
        memory = SharedMemory.__new__(SharedMemory)
        memory._map, memory.num_bytes = known, len(known)
        _OBJECTS[address] = memory
    return memory


def share(tensor: Tensor, *, what: str = "rows") -> SharedMemory:
    """Move a CPU tensor's bytes into memory that other processes can see; the tensor becomes a view of it.

    A tensor that is such a view already stays.

    Args:
        tensor: CPU tensor, contiguous, without gradient; `tensor.data` is replaced.
    """
    known = find_shared(tensor)
    if known is not None:
        return known
    if not tensor.is_contiguous() or tensor.is_cuda:
        raise ArgumentError(
            f"tensor must be contiguous and on the CPU, got strides {tensor.stride()} on {tensor.device}"
        )
    memory = SharedMemory(tensor.numel() * tensor.element_size())
    target = memory.view(tensor.dtype, tensor.shape)
    fill(target, tensor, what=what)
    tensor.data = target
    return memory


def pin(memory: SharedMemory, device: torch.device) -> Block:
    """Page-lock shared memory for this process, for its GPUs to read in place; once for all of them."""
    assert device.index is not None
    known = _PINNED.get(memory.bytes.data_ptr())
    if known is not None:
        return known
    block = Block("pinned", memory.num_bytes, device)
    block._keep = memory.bytes
    if memory.num_bytes > 0:
        with torch.cuda.device(device):
            bind_thread(device.index)
            with show_wait("locking shared memory", items=memory.num_bytes // 64):
                call("cuMemHostRegister", memory.bytes.data_ptr(), memory.num_bytes, _PORTABLE | _MAPPED)
        block._address = memory.bytes.data_ptr()
        _PINNED[block._address] = block
    return block
