"""One range of addresses over the memories of several GPUs, which any of them reads as it reads its own.

Chunks of GPU memory, each on the GPU that was chosen for it, are mapped one behind the other (CUDA's virtual memory
management). A kernel sees one array and needs not know of peers. Chunks belong to no process: they are freed when the
last mapping and the last handle to them are gone, so the end of the process that made them leaves the others' whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import CudaError, ForkedProcessError, MemoryLimitError
from pyg_direct.runtime.device import bind_thread
from pyg_direct.runtime.driver import call, load_driver, tolerate_captures

# What chunks are a multiple of on every GPU so far; asked of the driver, too.
GRANULE = 2 << 20


class Chunk:
    """Memory on one GPU that other processes can map.

    Args:
        num_bytes: A multiple of `GRANULE`.
        owner: GPU index.
        handle: The driver's, of memory that another process made; None makes new memory.
    """

    def __init__(self, num_bytes: int, owner: int, handle: Any = None) -> None:
        self.num_bytes, self.owner, self.process = num_bytes, owner, os.getpid()
        self.handle = _create(num_bytes, owner) if handle is None else handle
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """A file descriptor that stands for this chunk; it belongs to it."""
        if self._descriptor is None:
            self._descriptor = int(call("cuMemExportToShareableHandle", self.handle, _fd_type(), 0))
        return self._descriptor

    @classmethod
    def open(cls, descriptor: int, num_bytes: int, owner: int) -> Chunk:
        """The chunk that a descriptor stands for, in this process or another; the descriptor is closed."""
        try:
            handle = call("cuMemImportFromShareableHandle", descriptor, _fd_type())
        finally:
            os.close(descriptor)
        return cls(num_bytes, owner, handle)

    def __reduce__(self) -> Any:
        # Copied for the other process, while `spawn` starts it, or later through a socket.
        return _open_sent, (reduction.DupFd(self.descriptor), self.num_bytes, self.owner)

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None and self.process == os.getpid():
            with contextlib.suppress(Exception), tolerate_captures():
                if self._descriptor is not None:
                    os.close(self._descriptor)
                call("cuMemRelease", self.handle)


def _open_sent(descriptor: Any, num_bytes: int, owner: int) -> Chunk:
    load_driver()
    return Chunk.open(descriptor.detach(), num_bytes, owner)


def _fd_type() -> Any:
    return load_driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _create(num_bytes: int, owner: int) -> Any:
    driver = load_driver()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = owner
    properties.requestedHandleTypes = _fd_type()
    granule = int(call("cuMemGetAllocationGranularity", properties,
                       driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))  # fmt: skip
    assert num_bytes > 0
    assert num_bytes % granule == 0, f"{num_bytes} bytes are no multiple of {granule}"
    try:
        return call("cuMemCreate", num_bytes, properties, 0)
    except CudaError as error:
        raise MemoryLimitError(
            f"num_bytes must fit the free memory of GPU {owner}, got {num_bytes}: {error}"
        ) from error


class _Mapping:
    """Chunks behind one another in the addresses of one process, readable by kernels of one GPU."""

    def __init__(self, chunks: Sequence[Chunk], index: int) -> None:
        # Torch takes the device of the first byte for that of a tensor: memory of the reader's own comes first.
        self.chunks = [Chunk(GRANULE, index), *chunks]
        self.process, self.index, self.mapped = os.getpid(), index, 0
        self.num_bytes = sum(chunk.num_bytes for chunk in self.chunks)
        self.address = int(call("cuMemAddressReserve", self.num_bytes, 0, 0, 0))
        try:
            for chunk in self.chunks:
                call("cuMemMap", self.address + self.mapped, chunk.num_bytes, 0, chunk.handle, 0)
                self.mapped += chunk.num_bytes
            driver = load_driver()
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = index
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            call("cuMemSetAccess", self.address, self.num_bytes, [access], 1)
        except BaseException:
            self.close()
            raise
        self.__cuda_array_interface__ = {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False),
                                         "version": 3, "strides": None}  # fmt: skip

    def close(self) -> None:
        """Give the addresses back."""
        address, self.address = self.address, 0
        if address and self.process == os.getpid():
            if self.mapped:
                # Unlike memory that is freed, memory that is unmapped is not waited for by the driver.
                with torch.cuda.device(self.index):
                    call("cuCtxSynchronize")
                call("cuMemUnmap", address, self.mapped)
            call("cuMemAddressFree", address, self.num_bytes)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            with contextlib.suppress(Exception), tolerate_captures():
                self.close()


class Spread:
    """Memory over several GPUs.

    Args:
        chunks: One behind the other, of any owners.
        num_bytes: Bytes of them that are used.
    """

    def __init__(self, chunks: Sequence[Chunk], num_bytes: int) -> None:
        self.chunks, self.num_bytes = list(chunks), num_bytes

    @classmethod
    def allocate(cls, num_bytes: int, chunk_bytes: int, owners: Sequence[int]) -> Spread:
        """New memory: chunk after chunk on these GPUs."""
        return cls([Chunk(chunk_bytes, owner) for owner in owners], num_bytes)

    def view(self, index: int) -> Tensor:
        """All bytes as a tensor of GPU `index`, uint8 `[num_bytes]`; keeps the memory.

        Raises:
            CudaError: this GPU cannot read the memory of one of the owners.
        """
        if any(chunk.process != os.getpid() for chunk in self.chunks):
            raise ForkedProcessError("memory of GPUs was used in a forked child, which the CUDA driver cannot serve; "
                                     "start it with the 'spawn' method")  # fmt: skip
        device = torch.device("cuda", index)
        with torch.cuda.device(device):
            # The context of the reader must be there before memory is mapped for it.
            torch.empty(0, device=device)
            bind_thread(index)
            flat = torch.as_tensor(_Mapping(self.chunks, index), device=device)
        assert flat.device == device, f"memory mapped for {device} came as a tensor of {flat.device}"
        return flat[GRANULE : GRANULE + self.num_bytes]

    def bytes_on(self, index: int) -> int:
        """Bytes that lie on GPU `index`."""
        return sum(chunk.num_bytes for chunk in self.chunks if chunk.owner == index)
