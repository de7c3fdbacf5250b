"""Memory of arrays: GPU memory, unified memory, page-locked memory, ordinary memory, or a file.

Unified memory here never migrates. It is advised to stay on the CPU and is mapped into every GPU that uses it, in 2
MB pages. This lets random reads from a kernel run at the rate of the link (PyTorch-Direct, section 4.2).

`UnifiedPool` reuses unified memory, so that temporary tensors cost no call of the driver (PyTorch-Direct, section
4.4). A block without references goes to a list by its size, with events of the streams that may still read it. It
is given out again when the events have passed. The memory in the lists is bounded.

`choose_host_memory` chooses the host memory that a GPU reads faster at random positions, measured once on each
machine. Unified memory wins a tie. If the driver maps it in 2 MB pages it keeps its rate as a table grows. Page-locked
memory in 4 KB pages falls to a third (an H200 beside an x86 host, at 32 GB; up to 256 MB both are alike). The
measurement finds machines that serve unified memory badly: by faults, by migration or not at all. A large table is read
once more when it is filled, because a small one may be served better.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import platform
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_direct.cache_folder import recall
from pyg_direct.errors import (
    ArgumentError,
    ArgumentTypeError,
    CudaError,
    DeviceError,
    ForkedProcessError,
    MemoryLimitError,
    PlacementWarning,
    PygDirectError,
    warn,
)
from pyg_direct.profiling import time_on_stream
from pyg_direct.progress import Bar, show_wait
from pyg_direct.runtime.cuda.device import (
    abilities,
    advise,
    bind_thread,
    call,
    load_driver,
    resolve_device,
    tolerate_captures,
)
from pyg_direct.runtime.cuda.launch import current_stream
from pyg_direct.runtime.cuda.peer_memory import see_peer
from pyg_direct.runtime.host.host_memory import (
    allocating_on,
    choose_nodes,
    give_back,
    put_on,
    total_bytes,
    use_large_pages,
)
from pyg_direct.runtime.host.tensor_views import as_bytes, view_address
from pyg_direct.typing import Device

PLACEMENTS = ("cuda", "unified", "pinned", "cpu")
# Placements to try if one cannot be allocated, in this order.
FALLBACK = {"unified": ("pinned", "cpu"), "pinned": ("cpu",)}
_FILL_BYTES = 256 << 20
# Smaller tensors may share pages with others of the allocator, so their pages are not released early.
_RELEASE_BYTES = 64 << 20


_BLOCKS: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()


class Block:
    """A piece of memory with an owner: allocated whole, freed when its last view is gone.

    Attributes:
        placement: One of `PLACEMENTS`, the one that was obtained.
        device: The GPU it belongs to or was made for; None for `cpu`.
    """

    def __init__(self, placement: str, num_bytes: int, device: torch.device | None) -> None:
        self.placement = placement
        self.num_bytes = num_bytes
        self.device = device
        self._process = os.getpid()
        self._keep: Any = None
        self._address = 0
        self._users: set[int] = set()
        # Set by a pool that takes the memory over when this block is freed, after the work that these streams still do
        # with it.
        self.recycle: Callable[[Block], None] | None = None
        self.streams: dict[int, torch.cuda.Stream] = {}

    @property
    def address(self) -> int:
        """Address of the first byte."""
        self.check_process()
        return self._address

    def check_process(self) -> None:
        """Refuse GPU-visible memory in a forked child, which would end by SIGBUS on touching it."""
        if self._process != os.getpid() and self.placement in ("cuda", "unified", "pinned"):
            raise ForkedProcessError(
                f"{self.placement} memory of process {self._process} was used in its forked child {os.getpid()}, which "
                "the CUDA driver cannot serve; start the child with the 'spawn' method, or keep num_workers=0"
            )

    def view_on_cpu(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return a CPU tensor over the same bytes; keeps this block alive."""
        if self.placement == "cuda":
            raise ArgumentError("placement must be one the CPU can read, got 'cuda'")
        self._check_size(dtype, shape)
        if isinstance(self._keep, Tensor):
            return self._keep[: _count_bytes(dtype, shape)].view(dtype).view(tuple(shape))
        if self.num_bytes == 0 or 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        buffer = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        buffer._owner = self  # type: ignore[attr-defined]
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        return flat[: _count_bytes(dtype, shape)].view(dtype).view(tuple(shape))

    def view_on_gpu(self, dtype: torch.dtype, shape: Sequence[int], device: Device = None) -> Tensor:
        """Return a CUDA tensor over the same bytes, without copying; keeps this block alive.

        Args:
            dtype, shape: Dtype and shape of the tensor, which takes the first bytes.
            device: The GPU that reads them; by default the one that the block was made for. If the block lies in the
                memory of another GPU, kernels read it over NVLink or PCIe.
        """
        if self.placement == "cpu":
            raise ArgumentError(f"placement must be one a GPU can read, got {self.placement!r}")
        self.check_process()
        self._check_size(dtype, shape)
        target = self.device if device is None else resolve_device(device)
        assert target is not None and target.index is not None
        if self.placement == "cuda":
            assert isinstance(self._keep, Tensor)
            flat = self._keep if target == self._keep.device else see_peer(self._keep, target)
            return flat[: _count_bytes(dtype, shape)].view(dtype).view(tuple(shape))
        if self.num_bytes == 0 or 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype, device=target)
        bind_thread(target.index)
        self.let_use(target)
        address = self.address
        if self.placement == "pinned":
            address = int(call("cuMemHostGetDevicePointer", self.address, 0))
        with torch.cuda.device(target):
            flat = view_address(address, self.num_bytes, target, self)
        return flat[: _count_bytes(dtype, shape)].view(dtype).view(tuple(shape))

    def let_use(self, device: torch.device) -> None:
        """Map unified memory into one more GPU, so that its reads neither fault nor migrate pages."""
        if self.placement != "unified" or device.index in self._users:
            return
        advise(self.address, self.num_bytes, "SetAccessedBy", device.index)
        self._users.add(device.index)

    def _check_size(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        if _count_bytes(dtype, shape) > self.num_bytes:
            raise ArgumentError(f"shape must fit the block of {self.num_bytes} bytes, got {tuple(shape)} of {dtype}")

    def __getstate__(self) -> Any:
        raise ArgumentTypeError(f"a block of {self.placement} memory cannot be pickled; send its CPU view instead")

    def __del__(self, suppress: Any = contextlib.suppress, getpid: Any = os.getpid) -> None:
        # In a forked child, and while the interpreter ends, this process may not free the memory. Names of modules are
        # then gone before objects are, so they are passed in.
        if getattr(self, "_address", 0) and self._process == getpid():
            with suppress(Exception), tolerate_captures():
                if self.recycle is not None:
                    self.recycle(self)
                if self._address:
                    self._free()

    def hand_over(self) -> Block:
        """Move the memory to a new block; this one keeps none."""
        block = Block(self.placement, self.num_bytes, self.device)
        block._address, self._address = self._address, 0
        block._users = self._users
        _BLOCKS[block._address] = block
        return block

    def _free(self) -> None:
        address, self._address = self._address, 0
        if self.device is not None and self.device.index is not None:
            bind_thread(self.device.index)
        if self.placement == "unified":
            with torch.cuda.device(self.device):
                call("cuMemFree", address)
        elif self.placement == "pinned":
            # Memory that another owner made, and that this block only page-locked, is still held by it.
            call("cuMemFreeHost" if self._keep is None else "cuMemHostUnregister", address)


def _count_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def allocate(num_bytes: int, placement: str, device: Device = None) -> Block:
    """Allocate memory in exactly this placement.

    Args:
        num_bytes: Size, at least 0.
        placement: `cuda`, `unified`, `pinned` or `cpu`.
        device: The GPU that will use it; ignored for `cpu`.
    """
    if placement not in PLACEMENTS:
        raise ArgumentError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
    if num_bytes < 0:
        raise ArgumentError(f"num_bytes must be at least 0, got {num_bytes}")
    if placement == "cpu":
        block = Block(placement, num_bytes, None)
        block._keep = _empty_bytes(num_bytes)
        return block
    target = resolve_device("cuda" if device is None else device)
    if target.type != "cuda":
        raise DeviceError(f"placement={placement!r} needs a GPU, got device={str(device)!r}")
    block = Block(placement, num_bytes, target)
    with torch.cuda.device(target):
        bind_thread(target.index)
        if placement == "cuda":
            try:
                block._keep = torch.empty(num_bytes, dtype=torch.uint8, device=target)
            except torch.OutOfMemoryError as error:
                raise MemoryLimitError(f"num_bytes must fit free GPU memory, got {num_bytes}: {error}") from error
        elif num_bytes > 0:
            with show_wait(f"allocating {placement} memory", items=num_bytes // 64):
                _allocate_on_host(block)
            _BLOCKS[block.address] = block
    return block


def _allocate_on_host(block: Block) -> None:
    driver = load_driver()
    assert block.device is not None
    # Free memory is not checked: the system can free more.
    most = total_bytes()
    if block.num_bytes > most:
        raise MemoryLimitError(f"num_bytes must fit the {most} bytes of host memory, got {block.num_bytes} for "
                               f"{block.placement} memory")  # fmt: skip
    if block.placement == "unified":
        if not abilities(block.device.index).managed_without_migration:
            raise DeviceError("this GPU cannot share managed memory with the CPU (concurrentManagedAccess is 0)")
        flags = int(driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
        block._address = int(call("cuMemAllocManaged", block.num_bytes, flags))
        advise(block._address, block.num_bytes, "SetPreferredLocation", -1)
        nodes = choose_nodes(block.num_bytes, block.device.index)
        if len(nodes) == 1:
            # Older drivers know the CPU only as a whole.
            with contextlib.suppress(CudaError, AttributeError):
                advise(block._address, block.num_bytes, "SetPreferredLocation", -1, nodes[0])
        block.let_use(block.device)
    else:
        with allocating_on(choose_nodes(block.num_bytes, block.device.index)):
            block._address = int(call("cuMemHostAlloc", block.num_bytes, 0x01 | 0x02))


def _empty_bytes(num_bytes: int) -> Tensor:
    try:
        flat = use_large_pages(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
    except RuntimeError as error:
        raise MemoryLimitError(f"num_bytes must fit host memory, got {num_bytes}: {error}") from error
    # Smaller memory may share its pages with others of the allocator.
    if num_bytes >= _RELEASE_BYTES:
        put_on(flat.data_ptr(), num_bytes, choose_nodes(num_bytes, None))
    return flat


def allocate_or_fall_back(num_bytes: int, placement: str, device: Device = None) -> Block:
    """Allocate as `allocate`, but unified falls back to pinned and pinned to cpu, with a warning that says why."""
    reasons = []
    for attempt in (placement, *FALLBACK.get(placement, ())):
        try:
            block = allocate(num_bytes, attempt, device)
        except (CudaError, DeviceError) as error:
            reasons.append(f"{attempt}: {error}")
            continue
        if reasons:
            note = "; the CPU will gather rows, which is slower" if attempt == "cpu" else ""
            warn(f"placement={placement!r} fell back to {attempt!r} ({'; '.join(reasons)}){note}", PlacementWarning)
        return block
    raise MemoryLimitError(f"placement={placement!r} and its fall-backs could not be had: {'; '.join(reasons)}")


def find_block(tensor: Tensor) -> Block | None:
    """Return the unified or page-locked block that a CPU tensor is a whole view of, if there is one."""
    if tensor.is_cuda or not tensor.is_contiguous():
        return None
    block = _BLOCKS.get(tensor.data_ptr())
    if block is None or _count_bytes(tensor.dtype, tensor.shape) > block.num_bytes:
        return None
    return block


def fill(target: Tensor, source: Tensor, *, what: str = "rows", release: bool = False) -> None:
    """Copy `source` into `target` chunk by chunk, on all cores; shows a bar if it takes long.

    Args:
        target: Tensor over the destination; same shape and dtype as `source`.
        release: Release the pages of `source` as they are copied, so that both are never held whole; its contents are
            undefined afterwards.
    """
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ArgumentError(
            f"source must have shape {tuple(target.shape)} and dtype {target.dtype}, "
            f"got {tuple(source.shape)} and {source.dtype}"
        )
    total = source.numel() * source.element_size()
    if source.dim() == 0 or total <= _FILL_BYTES:
        target.copy_(source)
        return
    rows = max(1, _FILL_BYTES * len(source) // total)
    with Bar(total, f"placing {what}", "B") as bar:
        begin = 0
        try:
            while begin < len(source):
                piece = source[begin : begin + rows]
                target[begin : begin + rows].copy_(piece)
                begin += rows
                if release:
                    give_back(piece)
                bar.update(piece.numel() * piece.element_size())
        except BaseException:
            if release:
                # The first pages of the source are gone: the target must end up whole, also on Ctrl-C.
                target[begin:].copy_(source[begin:])
            raise


def _owns_storage(tensor: Tensor) -> bool:
    """Report whether only this tensor views its memory, which torch, not NumPy or a file, allocated."""
    storage = tensor.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    return (
        count is not None
        and storage.resizable()
        and not tensor.is_shared()
        and tensor.is_contiguous()
        and storage.nbytes() == tensor.numel() * tensor.element_size() >= _RELEASE_BYTES
        # One count for the tensor and one for the local storage object.
        and count(storage._cdata) <= 2
    )


def move(tensor: Tensor, placement: str, device: Device = None, *, what: str = "rows") -> Block:
    """Move a CPU tensor's bytes into host memory that a GPU reads; the tensor itself becomes a view of them.

    So rows are not held twice. Memory that only this tensor views is released while it is copied; if another tensor or
    array views it, that one keeps the old bytes. A tensor that already is a view of such memory stays.

    Args:
        tensor: CPU tensor without gradient; `tensor.data` is replaced.
        placement: `unified` or `pinned`; falls back as `allocate_or_fall_back` does.
    """
    known = find_block(tensor)
    if known is not None:
        return known
    block = allocate_or_fall_back(tensor.numel() * tensor.element_size(), placement, device)
    if block.placement == "cpu":
        # The tensor is in ordinary memory already.
        block._keep = as_bytes(tensor.detach().contiguous())
        return block
    target = block.view_on_cpu(tensor.dtype, tensor.shape)
    release = _owns_storage(tensor)
    try:
        fill(target, tensor, what=what, release=release)
    except BaseException:
        if release:
            tensor.data = target
        raise
    tensor.data = target
    return block


# Larger blocks go back to the driver: they are tables, not temporary tensors.
_MOST_BYTES = 1 << 30
# Most bytes that lie unused.
_MOST_KEPT = 2 << 30
_LEAST_BYTES = 4096
_STEP = 2 << 20


def round_size(num_bytes: int) -> int:
    """Round up the size of a request: powers of two up to 2 MiB, the pages of a GPU, then multiples of 2 MiB."""
    if num_bytes <= _STEP:
        return max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
    return -(-num_bytes // _STEP) * _STEP


class _Freed:
    """Memory that waits for its next user."""

    def __init__(self, block: Block, events: list[torch.cuda.Event]) -> None:
        self.block, self.events = block, events


class UnifiedPool:
    """Unified memory of all GPUs of a process, recycled."""

    def __init__(self) -> None:
        self._lists: dict[tuple[torch.device, int], list[_Freed]] = defaultdict(list)
        self._lock = threading.RLock()
        self._kept = 0

    def take(self, num_bytes: int, device: torch.device | None) -> Block:
        """Return a block of at least so many bytes: unified, or its fallback."""
        if device is None or num_bytes == 0 or num_bytes > _MOST_BYTES:
            return allocate_or_fall_back(num_bytes, "cpu" if device is None else "unified", device)
        size = round_size(num_bytes)
        with self._lock:
            freed = self._lists[device, size]
            # The block that was freed first is most likely no longer read.
            found = freed.pop(0) if freed else None
            self._kept -= size if found else 0
        if found is None:
            try:
                block = allocate_or_fall_back(size, "unified", device)
            except CudaError:
                self.clear()
                block = allocate_or_fall_back(size, "unified", device)
        else:
            for event in found.events:
                event.synchronize()
            block = found.block
        if block.placement == "unified":
            block.recycle = self._put
        return block

    def _put(self, block: Block) -> None:
        """Keep the memory of a block that is about to be freed, in a new block."""
        assert block.device is not None
        with self._lock:
            if self._kept + block.num_bytes > _MOST_KEPT or torch.cuda.is_current_stream_capturing():
                return
            events = []
            for stream in block.streams.values():
                event = torch.cuda.Event()
                event.record(stream)
                events.append(event)
            self._lists[block.device, block.num_bytes].append(_Freed(block.hand_over(), events))
            self._kept += block.num_bytes

    def clear(self) -> None:
        """Give all unused memory back to the driver."""
        with self._lock:
            self._lists.clear()
            self._kept = 0


POOL = UnifiedPool()


class UnifiedBytes:
    """The bytes that a unified tensor and its views share; the CPU and the streams of a GPU take turns on them."""

    def __init__(self, block: Block, device: torch.device | None) -> None:
        self.block = block
        # The GPU that reads them; None without one.
        self.device = device if block.placement in ("unified", "pinned") else None
        self.gpu = None if self.device is None else self.device.index
        self._flat: Tensor | None = None
        self._is_dirty = False

    def on_gpu(self) -> Tensor:
        """Return all bytes as the GPU sees them, for use on its current stream."""
        if self._flat is None:
            self._flat = self.block.view_on_gpu(torch.uint8, (self.block.num_bytes,), self.device)
        self.join()
        return self._flat

    def join(self) -> None:
        """Make the GPU's current stream wait for the writes of others to the bytes."""
        block = self.block
        block.check_process()
        number = torch._C._cuda_getCurrentRawStream(self.gpu)  # type: ignore[arg-type]
        if number in block.streams and not self._is_dirty:
            return
        stream, streams = current_stream(self.gpu), block.streams  # type: ignore[arg-type]
        if self._is_dirty and streams.keys() != {stream.cuda_stream} and not torch.cuda.is_current_stream_capturing():
            # Autograd regards them as CPU memory, and orders no streams for them.
            for other in streams.values():
                stream.wait_stream(other)
        streams[stream.cuda_stream] = stream

    def mark_written(self) -> None:
        """Record a write of the GPU to these bytes."""
        self._is_dirty = True

    def wait(self, for_write: bool) -> None:
        """Wait until the CPU may read bytes that the GPU writes, or write bytes that the GPU reads or writes."""
        self.block.check_process()
        if self.device is not None and self.block.streams and (for_write or self._is_dirty):
            for stream in self.block.streams.values():
                stream.synchronize()
            self.block.streams.clear()
            self._is_dirty = False


CANDIDATES = ("unified", "pinned")
# Filled within a few milliseconds, and larger than the caches of a GPU.
_TABLE_BYTES = 64 << 20
_ROW_BYTES = 512
_NUM_READS = 1 << 15
# Tables from this size on are read when they are filled; slow is less than this share of a small table's rate.
_LARGE = 1 << 30
_SLOW = 0.25
# Page-locked memory must be this much faster to be chosen.
_MARGIN = 1.1


@functools.cache
def choose_host_memory(index: int) -> str:
    """Return `unified` or `pinned`, whichever GPU `index` reads rows of faster at random; see `host_memory_rates`."""
    return decide(host_memory_rates(index)) if abilities(index).managed_without_migration else "pinned"


def host_memory_rates(index: int) -> dict[str, float]:
    """Return the bytes a second that GPU `index` reads at random, by kind of host memory; 0 for a kind that cannot be
    allocated.

    Takes at most 0.2 s on a machine that is not known yet; the rates are kept in `host_memory.json` in the package's
    cache folder, by GPU model, driver and host.
    """
    model, driver = torch.cuda.get_device_name(index), abilities(index).driver_version
    key = f"{model} | driver {driver} | {platform.node()}"
    rates: dict[str, float] = recall("host_memory", key, lambda: {name: _measure(name, index) for name in CANDIDATES},
                                     _are_rates)  # fmt: skip
    return rates


def _are_rates(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), (int, float)) for name in CANDIDATES)


def decide(rates: dict[str, float]) -> str:
    """Choose the placement for row rates in bytes a second; 0 stands for a placement that cannot be allocated."""
    return "pinned" if rates["pinned"] > _MARGIN * rates["unified"] else "unified"


def _measure(placement: str, index: int) -> float:
    """Measure bytes a second of random rows from a small table; 0 if it cannot be allocated."""
    device = torch.device("cuda", index)
    try:
        block = allocate(_TABLE_BYTES, placement, device)
    except PygDirectError:
        return 0.0
    block.view_on_cpu(torch.int64, _shape_of(block)).fill_(1)
    return _read_at_random(block)


def _shape_of(block: Block) -> tuple[int, int]:
    return block.num_bytes // _ROW_BYTES, _ROW_BYTES // 8


def _read_at_random(block: Block) -> float:
    """Measure bytes a second of random rows that the GPU of a block reads from it."""
    assert block.device is not None
    device, shape = block.device, _shape_of(block)
    table = block.view_on_gpu(torch.int64, shape, device)
    # A separate generator: a probe must not change the draws of a user's program.
    draws = torch.Generator(device).manual_seed(0)
    seconds = []
    with torch.cuda.device(device):
        out = torch.empty(_NUM_READS, shape[1], dtype=torch.int64, device=device)
        for _ in range(3):
            ids = torch.randint(shape[0], (_NUM_READS,), device=device, generator=draws)
            seconds.append(time_on_stream(partial(torch.index_select, table, 0, ids, out=out)))
    return _NUM_READS * _ROW_BYTES / min(seconds[1:])


def check_filled(block: Block, what: str) -> None:
    """Read 50 MB of a large table in host memory at random, once it is filled.

    Warns if it is read at less than a quarter of the rate of a small table. This happens if the driver moves or maps
    memory page by page. Other work on the link at the same time slows reads less.

    Args:
        block: Any block; only large blocks in host memory that a GPU reads are read.
    """
    if block.placement not in CANDIDATES or block.num_bytes < _LARGE or block.device is None:
        return
    expected, rate = host_memory_rates(block.device.index)[block.placement], _read_at_random(block)
    if rate < _SLOW * expected:
        other = CANDIDATES[1 - CANDIDATES.index(block.placement)]
        warn(f"the GPU reads {what} at {rate / 1e9:.2g} GB/s at random from {block.num_bytes / 1e9:.3g} GB of "
             f"{block.placement} memory, a small table at {expected / 1e9:.2g}: placement={other!r} may be faster",
             PlacementWarning)  # fmt: skip
