"""Range of addresses over the memories of several GPUs, read by any of them as its own memory.

Chunks of GPU memory, each on the GPU chosen for it, are mapped one after the other (CUDA's virtual memory management).
A kernel sees one array and is not aware of peers. Chunks belong to no process. They are freed when the last mapping and
the last handle to them are gone. So if the process that made them ends, the others' chunks stay whole.

`find_cliques` finds which GPUs of this host read each other's memory: the cliques that share a cache. Quiver names
these `p2pCliqueTopo` and `init_p2p`; graphlearn-for-pytorch names one `DeviceGroup`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from multiprocessing import reduction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import (
    ArgumentError,
    ArgumentTypeError,
    CudaError,
    DeviceError,
    ForkedProcessError,
    MemoryLimitError,
)
from pyg_direct.runtime.cuda.device import bind_thread, call, load_driver, resolve_device, tolerate_captures
from pyg_direct.runtime.host.tensor_views import view_address

# Granularity of chunks on every GPU so far; the driver is also asked.
GRANULE = 2 << 20


class Chunk:
    """Memory on one GPU that other processes can map.

    Args:
        num_bytes: A multiple of `GRANULE`.
        handle: The driver's handle of memory that another process made; None makes new memory.
    """

    def __init__(self, num_bytes: int, owner: int, handle: Any = None) -> None:
        self.num_bytes, self.owner, self.process = num_bytes, owner, os.getpid()
        self.handle = _create(num_bytes, owner) if handle is None else handle
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """Return a file descriptor of this chunk; the chunk owns it."""
        if self._descriptor is None:
            self._descriptor = int(call("cuMemExportToShareableHandle", self.handle, _fd_type(), 0))
        return self._descriptor

    @classmethod
    def open(cls, descriptor: int, num_bytes: int, owner: int) -> Chunk:
        """Open the chunk of a descriptor, in this process or another; the descriptor is closed."""
        try:
            handle = call("cuMemImportFromShareableHandle", descriptor, _fd_type())
        finally:
            os.close(descriptor)
        return cls(num_bytes, owner, handle)

    def __reduce__(self) -> Any:
        # Copied for the other process, while `spawn` starts it, or later through a socket.
        return _open_sent, (reduction.DupFd(self.descriptor), self.num_bytes, self.owner)

    def __del__(self, suppress: Any = contextlib.suppress, getpid: Any = os.getpid) -> None:
        # Names are passed in: at interpreter exit, names of modules are gone before objects are.
        if getattr(self, "handle", None) is not None and self.process == getpid():
            with suppress(Exception), tolerate_captures():
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
    """Chunks one after the other in the addresses of one process, readable by kernels of one GPU."""

    def __init__(self, chunks: Sequence[Chunk], index: int) -> None:
        # Torch derives the device of a tensor from its first byte: the reader's own memory comes first.
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
        """Release the addresses."""
        address, self.address = self.address, 0
        if address and self.process == os.getpid():
            if self.mapped:
                # The driver waits for kernels before it frees memory, but not before it unmaps memory.
                with torch.cuda.device(self.index):
                    call("cuCtxSynchronize")
                call("cuMemUnmap", address, self.mapped)
            call("cuMemAddressFree", address, self.num_bytes)

    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        if getattr(self, "address", 0):
            with suppress(Exception), tolerate_captures():
                self.close()


class Spread:
    """Memory over several GPUs.

    Args:
        chunks: Chunks one after the other, of any owners.
        num_bytes: Bytes of them that are used.
    """

    def __init__(self, chunks: Sequence[Chunk], num_bytes: int) -> None:
        self.chunks, self.num_bytes = list(chunks), num_bytes

    @classmethod
    def allocate(cls, num_bytes: int, chunk_bytes: int, owners: Sequence[int]) -> Spread:
        """Allocate new memory: chunk after chunk on these GPUs."""
        return cls([Chunk(chunk_bytes, owner) for owner in owners], num_bytes)

    def view(self, index: int) -> Tensor:
        """Return all bytes as a tensor of GPU `index`, uint8 `[num_bytes]`, which keeps the memory alive."""
        if any(chunk.process != os.getpid() for chunk in self.chunks):
            raise ForkedProcessError("memory of GPUs was used in a forked child, which the CUDA driver cannot serve; "
                                     "start it with the 'spawn' method")  # fmt: skip
        device = torch.device("cuda", index)
        with torch.cuda.device(device):
            # The context of the reader must exist before memory is mapped for it.
            torch.empty(0, device=device)
            bind_thread(index)
            flat = torch.as_tensor(_Mapping(self.chunks, index), device=device)
        assert flat.device == device, f"memory mapped for {device} came as a tensor of {flat.device}"
        return flat[GRANULE : GRANULE + self.num_bytes]

    def bytes_on(self, index: int) -> int:
        """Return bytes that lie on GPU `index`."""
        return sum(chunk.num_bytes for chunk in self.chunks if chunk.owner == index)


_ALREADY_ENABLED = 704


class Link(NamedTuple):
    """Access of one GPU to another. `is_nvlink`: Over NVLink, at several times the rate of a PCIe link."""

    can_read: bool
    is_nvlink: bool


class DeviceGroup:
    """GPUs that share a cache, named by hand.

    Args:
        group_id: A number of the caller's.
        device_list: GPU indices.

    Raises:
        ArgumentError, ArgumentTypeError: `device_list` is no list of different GPU indices.

    Example:
        >>> group = DeviceGroup(0, [0, 1])
        >>> group, group.size
        (DeviceGroup(0, [0, 1]), 2)
    """

    def __init__(self, group_id: int, device_list: Sequence[int]) -> None:
        self.group_id, self.device_list = group_id, check_devices(device_list)

    @property
    def size(self) -> int:
        """Number of GPUs."""
        return len(self.device_list)

    def __repr__(self) -> str:
        return f"DeviceGroup({self.group_id}, {self.device_list})"


class p2pCliqueTopo:  # noqa: N801 (Quiver's name)
    """The cliques among some GPUs: groups in which each reads every other's memory over NVLink.

    There may be any number of any size; a GPU without a link to another is a clique of its own.

    Args:
        device_list: GPU indices.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.
    """

    def __init__(self, device_list: Sequence[int]) -> None:
        devices = check_devices(device_list)
        for device in devices:
            resolve_device(device)
        self.p2p_clique = dict(enumerate(find_cliques(devices, lambda a, b: read_link(a, b).is_nvlink)))

    def get_clique_id(self, device_id: int) -> int:
        """Number of the clique of a GPU, from 0.

        Args:
            device_id: Index of the GPU.

        Raises:
            ArgumentError: the GPU is not in the topology.
        """
        for number, clique in self.p2p_clique.items():
            if device_id in clique:
                return number
        raise ArgumentError(f"device_id must be one of the devices of the topology, got {device_id}")

    def info(self) -> str:
        """Return a line for each clique."""
        return "\n".join(f"clique {number}: GPUs {', '.join(map(str, c))}" for number, c in self.p2p_clique.items())

    def __repr__(self) -> str:
        return f"p2pCliqueTopo({list(self.p2p_clique.values())})"


def check_devices(device_list: Sequence[int], name: str = "device_list") -> list[int]:
    """Return a list of different GPU indices, from an argument of this name."""
    devices = list(device_list) if isinstance(device_list, (Sequence, set, frozenset)) else []
    if not devices or any(isinstance(d, bool) or not isinstance(d, int) or d < 0 for d in devices):
        raise ArgumentTypeError(f"{name} must hold GPU indices, at least one, got {device_list!r}")
    if len(set(devices)) < len(devices):
        raise ArgumentError(f"{name} must hold every GPU once, got {devices}")
    return devices


def find_cliques(devices: Sequence[int], is_linked: Callable[[int, int], bool]) -> list[list[int]]:
    """Return disjoint groups of `devices`, largest first, in which each GPU is linked to every other in both
    directions.

    Among groups of one size, the one with the first devices is taken, so that all processes find the same.
    """
    both = {frozenset(pair) for pair in combinations(devices, 2) if is_linked(*pair) and is_linked(*reversed(pair))}
    left, cliques = list(devices), []
    while left:
        cliques.append(_largest(left, both))
        left = [device for device in left if device not in cliques[-1]]
    return sorted(cliques, key=lambda clique: devices.index(clique[0]))


def _largest(devices: Sequence[int], linked: set[frozenset[int]]) -> list[int]:
    """Return the largest group of linked devices."""
    best: list[int] = [devices[0]]

    def extend(group: list[int], candidates: list[int]) -> None:
        nonlocal best
        if len(group) > len(best):
            best = group
        for at, device in enumerate(candidates):
            if len(group) + len(candidates) - at <= len(best):
                return
            extend([*group, device], [c for c in candidates[at + 1 :] if frozenset((device, c)) in linked])

    extend([], list(devices))
    return best


def read_link(reader: int, owner: int) -> Link:
    """Read from the driver how GPU `reader` reaches the memory of GPU `owner`."""
    attribute = load_driver().CUdevice_P2PAttribute
    pair = call("cuDeviceGet", reader), call("cuDeviceGet", owner)

    def ask(name: str) -> bool:
        return bool(call("cuDeviceGetP2PAttribute", getattr(attribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}"), *pair))

    can_read = ask("ACCESS_SUPPORTED")
    # PCIe has no atomics of the width that NVLink has.
    return Link(can_read, can_read and ask("NATIVE_ATOMIC_SUPPORTED"))


def init_p2p(device_list: Sequence[int]) -> list[tuple[int, int]]:
    """Let kernels of each GPU read tensors of every other one that it reaches, in this process.

    Args:
        device_list: Numbers of the GPUs.

    Returns:
        The pairs (reader, owner) that are now open. Caches of a `Feature` need no such call.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.
    """
    devices = check_devices(device_list)
    for device in devices:
        resolve_device(device)
    return [pair for pair in permutations(devices, 2) if open_pair(*pair)]


def open_pair(reader: int, owner: int) -> bool:
    """Let kernels of a GPU read the memory of another one, in this process; return False if they cannot."""
    if not read_link(reader, owner).can_read:
        return False
    with torch.cuda.device(owner):
        bind_thread(owner)
        torch.empty(0, device="cuda")
        context = call("cuCtxGetCurrent")
    with torch.cuda.device(reader):
        bind_thread(reader)
        code = load_driver().cuCtxEnablePeerAccess(context, 0)[0]
    return int(code) in (0, _ALREADY_ENABLED)


def see_peer(flat: Tensor, device: torch.device) -> Tensor:
    """View memory of a GPU as a tensor of another one, uint8 `[n]`."""
    assert device.index is not None
    if flat.numel() == 0:
        return flat.new_empty(0, device=device)
    if not open_pair(device.index, flat.device.index):
        raise DeviceError(f"device must be a GPU that can read the memory of {flat.device}, got {device}")
    return view_address(flat.data_ptr(), flat.numel(), device, flat)
