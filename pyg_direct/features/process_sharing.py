"""Features that processes of a host read: a handle sent to each, opened by each for its device; copies and pickles.

Rows on the host exist once, in shared memory. `choose_cold` chooses the kind of host memory for rows that are not hot,
by the memory of the hosts. Hot rows are copied by every GPU (`device_replicate`). Or they exist once in the memories of
a clique, for each of its GPUs to read (`p2p_clique_replicate`). `deal_chunks` distributes the hot rows over the GPUs of
the clique.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, CudaError, PlacementWarning, warn
from pyg_direct.features.hot_rows import choose_hottest, copy_rows, fit_budget, score_rows
from pyg_direct.features.memory_rows import MemoryRows
from pyg_direct.features.spilled_rows import SpilledRows
from pyg_direct.features.tiers.choice import open_table
from pyg_direct.ops.argument_checks import check_choice
from pyg_direct.ops.rows.gather_rows import Directory
from pyg_direct.runtime.comm.host_group import count_processes, gather, give_to_host, has_group, identify_host
from pyg_direct.runtime.cuda.device import abilities, resolve_device
from pyg_direct.runtime.cuda.memory import Block, allocate, fill
from pyg_direct.runtime.cuda.peer_memory import GRANULE, DeviceGroup, Spread, check_devices, p2pCliqueTopo
from pyg_direct.runtime.host.host_memory import HOST_SHARE, available_bytes, parse_size
from pyg_direct.runtime.host.shared_memory import SharedMemory, find_shared, pin, share
from pyg_direct.runtime.host.tensor_views import ordinary_tensors

POLICIES = ("device_replicate", "p2p_clique_replicate")
# Arguments of a `Feature` that a handle brings along.
_OPTIONS = ("device_cache_size", "cache_policy", "cold_policy", "link_blocks")
COLD_POLICIES = ("auto", "unified", "pinned", "shard")


class Room(NamedTuple):
    """Host memory that a process reports. `is_shared`: True if its rows lie in memory that processes share already."""

    host: str
    num_bytes: int
    is_shared: bool


def check_cold(cold_policy: str, cache_policy: str | None) -> None:
    """Refuse an unknown policy, and rows that are shared in two ways at once."""
    check_choice("cold_policy", cold_policy, COLD_POLICIES)
    if cold_policy == "shard" and cache_policy == "p2p_clique_replicate":
        raise ArgumentError("cold_policy='shard' needs cache_policy='device_replicate', as each process keeps hot rows "
                            "of its own, got 'p2p_clique_replicate'")  # fmt: skip


def read_gpus(device_list: Sequence[int] | str, cache_policy: str, cold_policy: str,
              device_group_list: Sequence[Any] | None) -> tuple[Any, list[list[int]] | None]:  # fmt: skip
    """Check and return (`device_list`, `device_group_list`) of a `Feature`."""
    check_choice("cache_policy", cache_policy, POLICIES)
    check_cold(cold_policy, cache_policy)
    if isinstance(device_list, str) and device_list != "group":
        raise ArgumentError(f"device_list must hold GPU indices or be 'group', got {device_list!r}")
    if cold_policy == "shard" and device_list != "group":
        raise ArgumentError(f"cold_policy='shard' needs device_list='group', got {device_list!r}")
    devices: Any = device_list if isinstance(device_list, str) else check_devices(device_list)
    if device_group_list is None:
        return devices, None
    name = "device_group_list"
    if isinstance(device_group_list, (str, bytes)) or not isinstance(device_group_list, Sequence):
        raise ArgumentTypeError(f"{name} must be a list of groups of GPUs, got {device_group_list!r}")
    groups = [g.device_list if isinstance(g, DeviceGroup) else check_devices(g, name) for g in device_group_list]
    check_devices([device for group in groups for device in group], name)
    return devices, groups


def choose_cold(policy: str, num_bytes: int, devices: Sequence[int]) -> str:
    """Choose the memory in which the processes of these GPUs read `num_bytes` of rows: `unified`, a copy for each, or
    `pinned`.

    Unified memory is read at the rate of the link at any size, but no two processes can share it.
    """
    if policy in ("unified", "pinned"):
        return policy
    if not all(abilities(index).managed_without_migration for index in devices):
        return "pinned"
    return "unified" if len(devices) * num_bytes <= HOST_SHARE * available_bytes() else "pinned"


def ask_rooms(is_shared: bool) -> list[Room]:
    """Collect the host memory of each process of the group, by rank; called by all of them."""
    return [Room(*room) for room in gather((identify_host(), int(HOST_SHARE * available_bytes()), is_shared))]


def find_too_small(rooms: Sequence[Room], num_bytes: int) -> Room | None:
    """Return a host that cannot hold all rows once, if every host can hold the shares of its processes; otherwise None.

    Shares of the processes of one host are no less than one copy of the rows.
    """
    counts, lacking = Counter(room.host for room in rooms), None
    for host, count in counts.items():
        here = [room for room in rooms if room.host == host]
        least = min(here, key=lambda room: room.num_bytes)
        if any(room.is_shared for room in here) or num_bytes <= least.num_bytes:
            continue
        if num_bytes * count > least.num_bytes * len(rooms):
            return None
        lacking = least
    return lacking


def is_shared_out(policy: str, rows: Tensor) -> bool:
    """Report whether each process of the group keeps a part of the rows, as requested or because only that fits. All
    processes call it, and a warning reports the choice.
    """
    if policy not in ("auto", "shard") or count_processes() < 2:
        return False
    if policy == "auto":
        num_bytes = rows.numel() * rows.element_size()
        lacking = find_too_small(ask_rooms(find_shared(rows) is not None), num_bytes)
        if lacking is None:
            return False
        warn(f"cold_policy='auto' shares the rows out over {count_processes()} processes, which all take part in "
             f"each read: they have {num_bytes} bytes, of which a host ({lacking.host}) has "
             f"{lacking.num_bytes} to give", PlacementWarning)  # fmt: skip
    return True


# Parts on each GPU: enough to balance their heat, few enough to open at once.
PARTS = 16


def fit_rows(num_rows: int, row_bytes: int, budget: int, num_gpus: int) -> tuple[int, int]:
    """Return (rows that a clique caches, bytes of a chunk), so that no GPU holds more than `budget` bytes.

    Args:
        row_bytes: Bytes of a row as it is stored.
        budget: GPU memory in bytes for each GPU.
    """
    count = min(num_rows, budget * num_gpus // max(1, row_bytes))
    chunk_bytes = max(1, math.ceil(count * row_bytes / (PARTS * num_gpus * GRANULE))) * GRANULE
    return min(count, num_gpus * (budget // chunk_bytes) * chunk_bytes // max(1, row_bytes)), chunk_bytes


def weigh_chunks(heat: Tensor | None, num_rows: int, row_bytes: int, chunk_bytes: int) -> Tensor:
    """Return how often each chunk is read, float64 `[C]`; its number of rows if no heat is known.

    Args:
        heat: How often each row is read, `[num_rows]`, in the order of the rows; None if not known.
        num_rows, row_bytes: Number and size of the rows that lie in the chunks, one after the other.
        chunk_bytes: Bytes of a chunk.
    """
    num_chunks = math.ceil(num_rows * row_bytes / chunk_bytes)
    # A row belongs to the chunk that it begins in.
    chunk_of_row = torch.arange(num_rows, device="cpu") * row_bytes // chunk_bytes
    weights = torch.ones(num_rows, dtype=torch.float64, device="cpu") if heat is None else heat.cpu().double()
    return torch.zeros(num_chunks, dtype=torch.float64, device="cpu").index_add_(0, chunk_of_row, weights)


def deal_chunks(weights: Tensor, devices: Sequence[int]) -> list[int]:
    """Choose the GPU of each chunk: numbers of chunks differ by one at most, and GPUs are read from about equally
    often.

    The heaviest chunk goes first, each to the GPU that has least so far.
    """
    most = math.ceil(len(weights) / len(devices))
    full = len(weights) - (most - 1) * len(devices)
    load, count, owner = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0), [0] * len(weights)
    for chunk in weights.argsort(descending=True, stable=True).tolist():
        # Only so many GPUs may have one chunk more than the others.
        num_full = sum(n == most for n in count.values())
        open_to = [d for d in devices if count[d] < most - 1 or (count[d] < most and num_full < full)]
        target = min(open_to, key=lambda d: (load[d], devices.index(d)))
        owner[chunk] = target
        load[target] += float(weights[chunk])
        count[target] += 1
    return owner


_LOGGER = logging.getLogger(__name__)
# Words of a directory that are read at once.
_WORDS_AT_ONCE = 1 << 18


@dataclass
class HotRows:
    """The hot rows of a group of GPUs.

    Attributes:
        directory: Bits and ranks of their ranked bitmap; None if no row or every row is hot.
        spread: Their memory, distributed over the GPUs; None if every GPU makes its own copy.
    """

    devices: list[int]
    count: int
    directory: tuple[SharedMemory, SharedMemory] | None = None
    spread: Spread | None = None

    def open_directory(self) -> Directory | None:
        """Return the directory, on the CPU."""
        if self.directory is None:
            return None
        bits, ranks = self.directory
        return Directory(bits.bytes.view(torch.uint32), ranks.bytes.view(torch.int32))


@dataclass
class Handle:
    """A feature as it is sent.

    Attributes:
        shape: Of the table, `[N, ...]`.
        cold: Memory in which GPUs read rows that are not hot: `unified` or `pinned`.
        exponents: Of float8 rows, uint8 `[N]`.
        misses: Share of all reads that miss the hot rows, by listings, for each entry of `hot`.
        order: Row of each id, counted from 1, if ids are not rows.
    """

    shape: torch.Size
    stored: torch.dtype
    dtype: torch.dtype
    host: SharedMemory
    cold: str
    exponents: Tensor | None = None
    misses: list[float] = field(default_factory=list)
    hot: list[HotRows] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    order: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """All rows, on the CPU."""
        return self.host.view(self.stored, self.shape)

    def find_hot(self, device: torch.device) -> int | None:
        """Return the number of the hot rows that a device reads."""
        return next((i for i, hot in enumerate(self.hot) if device.index in hot.devices), None)


def share_rows(feature: Any, cpu_tensor: Tensor, rows: Tensor, exponents: Tensor | None) -> Handle:
    """Put the rows of a `Feature` into memory that all processes and GPUs read; with `device_list="group"` all call it.

    Args:
        cpu_tensor: The user's tensor, which becomes a view of shared memory if possible.
    """
    is_plain = not (cpu_tensor.requires_grad or cpu_tensor.is_conj() or cpu_tensor.is_neg() or cpu_tensor.is_cuda)
    source = cpu_tensor if is_plain and cpu_tensor.is_contiguous() else rows.cpu().contiguous()

    def make(devices: list[int | None]) -> Handle:
        on_gpus = [device for device in devices if device is not None]
        if len(set(on_gpus)) < len(on_gpus):
            raise ArgumentError(f"device must be another GPU in every process of a host, got {on_gpus}: call "
                                "torch.cuda.set_device(local_rank) first")  # fmt: skip
        return handle_of(feature, source, exponents, _find_cliques(feature, on_gpus))

    if feature.device_list == "group":
        handle = give_to_host(make, feature.device.index) if has_group() else make([feature.device.index])
    else:
        handle = make([*feature.device_list])
    shared = handle.rows
    if source.data_ptr() != shared.data_ptr() and (source.shape, source.dtype) == (shared.shape, shared.dtype):
        source.data = shared
    return handle


def _find_cliques(feature: Any, devices: list[int]) -> list[list[int]]:
    for device in devices:
        resolve_device(device)
    if feature.device_group_list is not None:
        named = {device for group in feature.device_group_list for device in group}
        if not named.issuperset(devices):
            raise ArgumentError(f"device_group_list must name every GPU of {devices}, got {feature.device_group_list}")
        groups = [[device for device in group if device in devices] for group in feature.device_group_list]
        return [group for group in groups if group]
    if feature.cache_policy == "device_replicate" or len(devices) < 2:
        return [[device] for device in devices]
    return list(p2pCliqueTopo(devices).p2p_clique.values())


def handle_of(feature: Any, source: Tensor, exponents: Tensor | None, cliques: Sequence[Sequence[int]]) -> Handle:
    """Return the handle of a `Feature` whose rows, as they are stored, are `source`; see `make_handle`."""
    num_bytes = source.numel() * source.element_size()
    budget = min(num_bytes, parse_size(feature.device_cache_size, num_bytes))
    scores = score_rows(feature.hotness, feature.csr_topo, len(source)) if cliques and budget > 0 else None
    handle = make_handle(source, feature.dtype, None if exponents is None else exponents.cpu(), scores, budget, cliques,
                         policy=feature.cache_policy, cold_policy=feature.cold_policy)  # fmt: skip
    handle.options = {name: getattr(feature, name) for name in _OPTIONS}
    return handle


def make_handle(rows: Tensor, dtype: torch.dtype, exponents: Tensor | None, heat: Tensor | None, budget: int,
               cliques: Sequence[Sequence[int]], *, policy: str, cold_policy: str) -> Handle:  # fmt: skip
    """Share the rows, choose the hot ones and put them into memory that GPUs read.

    Args:
        rows: `[N, ...]` on the CPU, contiguous; becomes a view of shared memory.
        exponents: Of float8 rows.
        heat: How often each row is read, `[N]`; None takes the first rows for hot.
        budget: GPU memory in bytes for the hot rows of each GPU.
        cliques: GPUs of this host that read each other's memory; none on a CPU.
        policy: `device_replicate` or `p2p_clique_replicate`.
        cold_policy: See `Feature`; the rows of one process, or of one host, are not shared out.
    """
    host = share(rows, what="features")
    devices = [index for clique in cliques for index in clique]
    num_bytes = rows.numel() * rows.element_size()
    handle = Handle(rows.shape, rows.dtype, dtype, host, choose_cold(cold_policy, num_bytes, devices), exponents)
    if not devices:
        return handle
    # Only this GPU: a query of the others would take some of their memory for this process.
    budget = fit_budget(budget, budget, torch.device("cuda", devices[0]))
    row_bytes = num_bytes // max(1, len(rows))
    is_spread = policy == "p2p_clique_replicate" and budget >= GRANULE
    for clique in cliques if is_spread else [devices]:
        count, chunk_bytes = fit_rows(len(rows), row_bytes, budget, len(clique) if is_spread else 1)
        if not is_spread:
            count = min(len(rows), budget // max(1, row_bytes))
        ids, misses = choose_hottest(heat, len(rows), count)
        hot = HotRows(list(clique), count)
        if 0 < count < len(rows):
            directory = Directory.of(ids, len(rows))
            hot.directory = share(directory.bits), share(directory.ranks)
        if is_spread and len(clique) > 1 and count > 0:
            hot.spread = _spread_rows(rows, ids, None if heat is None else heat.cpu()[ids], clique, chunk_bytes)
        handle.hot.append(hot)
        handle.misses.append(misses)
    _say(handle, row_bytes)
    return handle


def _spread_rows(rows: Tensor, ids: Tensor, heat: Tensor | None, clique: Sequence[int], chunk_bytes: int) -> Spread:
    row_bytes = rows[0].numel() * rows.element_size()
    owners = deal_chunks(weigh_chunks(heat, len(ids), row_bytes, chunk_bytes), clique)
    spread = Spread.allocate(len(ids) * row_bytes, chunk_bytes, owners)
    copy_rows(rows, ids if len(ids) < len(rows) else None, _as_rows(spread.view(clique[0]), rows))
    torch.cuda.synchronize(clique[0])
    return spread


def _as_rows(flat: Tensor, rows: Tensor) -> Tensor:
    return flat.view(rows.dtype).view(-1, *rows.shape[1:])


def list_hot_ids(directory: Directory) -> Tensor:
    """Return ids of a directory on the CPU, ascending, int64."""
    words = directory.bits.view(torch.int32)
    pieces = []
    for begin in range(0, len(words), _WORDS_AT_ONCE):
        bits = (words[begin : begin + _WORDS_AT_ONCE, None] >> torch.arange(32, dtype=torch.int32, device="cpu")) & 1
        pieces.append(32 * begin + bits.view(-1).nonzero().view(-1))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")


def open_handle(handle: Handle, device: torch.device, link_blocks: int | None = None) -> MemoryRows:
    """Return the rows as a device of this process reads them."""
    rows = handle.rows
    if device.type == "cpu":
        return MemoryRows(open_table(rows), device, handle.dtype, exponents=handle.exponents)
    number = handle.find_hot(device)
    hot = HotRows([], 0) if number is None else handle.hot[number]
    exponents = None if handle.exponents is None else handle.exponents.to(device)
    if hot.spread is not None:
        table = _as_rows(hot.spread.view(device.index), rows)
    else:
        table = torch.empty((hot.count, *rows.shape[1:]), dtype=rows.dtype, device=device)
        if hot.count > 0:
            directory = hot.open_directory()
            copy_rows(rows, None if directory is None else list_hot_ids(directory), table)
    near = open_table(table, spread=hot.spread)
    if hot.count == len(rows):
        return MemoryRows(near, device, handle.dtype, exponents=exponents)
    block = _place_cold(handle, device)
    directory = hot.open_directory()
    directory = None if directory is None else directory.to(device)
    misses = 1.0 if number is None else handle.misses[number]
    far = open_table(block.view_on_gpu(handle.stored, handle.shape, device), block)
    return MemoryRows(far, device, handle.dtype, hot=None if directory is None else near, directory=directory,
                      exponents=exponents, misses=misses, link_blocks=link_blocks)  # fmt: skip


def _place_cold(handle: Handle, device: torch.device) -> Block:
    num_bytes = handle.host.num_bytes
    if handle.cold == "unified":
        block = allocate(num_bytes, "unified", device)
        fill(block.view_on_cpu(handle.stored, handle.shape), handle.rows, what="features")
        return block
    try:
        return pin(handle.host, device)
    except CudaError as error:
        raise ArgumentError(f"cold_policy='pinned' could not lock {num_bytes} bytes of host memory: {error}") from error


def _say(handle: Handle, row_bytes: int) -> None:
    size = handle.host.num_bytes
    groups = [f"GPUs {','.join(map(str, h.devices))}: {h.count} hot rows "
              f"{'shared out' if h.spread is not None else 'each'}" for h in handle.hot]  # fmt: skip
    copies = sum(len(h.devices) for h in handle.hot) if handle.cold == "unified" else 0
    _LOGGER.info(
        "%d rows of %d bytes: %s; the others %s, %.1f GB of host memory in %d + 1 copies", handle.shape[0], row_bytes,
        "; ".join(groups), handle.cold, (copies + 1) * size / 1e9, copies)  # fmt: skip


# Arguments that a saved feature is made with again.
_SAVED_OPTIONS = ("device_cache_size", "cache_policy", "link_blocks", "store_dtype")


def copy_feature(feature: Any) -> Any:
    """Return another feature over the same rows."""
    made = object.__new__(type(feature))
    made.__dict__.update(feature.__dict__)
    made._served = copy.deepcopy(feature._served)
    if isinstance(feature.stored, MemoryRows):
        made.stored = feature.stored.copy()
        made.stored.served = made._served
    return made


def deepcopy_feature(feature: Any) -> Any:
    """Return a feature with a copy of the rows; see `Feature.__deepcopy__`."""
    if isinstance(feature.stored, SpilledRows) and not feature.stored.tier.is_collective:
        return copy_feature(feature)
    stored = feature.stored if isinstance(feature.stored, MemoryRows) and feature._handle is None else None
    if feature._shape is not None and (stored is None or stored.tier.block is not None):
        make, arguments = send_feature(feature)
        return make(*arguments)
    made = copy_feature(feature)
    made._order = None if feature._order is None else feature._order.clone()
    if isinstance(made.stored, MemoryRows):
        made.stored.own_rows()
    return made


def find_stored(feature: Any) -> Tensor:
    """Return all stored rows, `[N, ...]`, on the host unless all are in GPU memory; refuse what cannot be sent."""
    feature._filled()
    if isinstance(feature.stored, SpilledRows):
        feature.stored.tier.check_sending()
    if feature._handle is not None:
        rows: Tensor = feature._handle.rows
        return rows
    assert isinstance(feature.stored, MemoryRows)
    return feature.stored.list_stored()


def share_feature(feature: Any) -> Handle:
    """Return a handle for other processes of this host; see `Feature.share_ipc`."""
    rows = find_stored(feature)
    if feature._handle is None:
        assert isinstance(feature.stored, MemoryRows)
        devices = [[index] for index in range(torch.cuda.device_count())]
        feature._handle = handle_of(feature, rows.cpu().contiguous(), feature.stored.exponents, devices)
        if not feature.stored.is_on_gpu:
            feature.stored.use_table(feature._handle.rows)
    handle: Handle = feature._handle
    handle.order = None if feature._order is None else feature._order.cpu()
    return handle


def send_feature(feature: Any) -> Any:
    """Let `multiprocessing` send a feature by a handle; a receiver that is no process gets the rows."""
    return type(feature).lazy_from_ipc_handle, (feature.share_ipc(),)


def reduce_feature(feature: Any) -> Any:
    """Return the call that opens a saved feature, for pickles."""
    if feature._shape is None:
        raise ArgumentError("a Feature without rows cannot be sent: call from_cpu_tensor or from_file first")
    rows = find_stored(feature)
    # Rows that were written on a GPU are there.
    feature.synchronize()
    options: dict[str, Any] = {name: getattr(feature, name) for name in _SAVED_OPTIONS}
    scores = score_rows(feature.hotness, feature.csr_topo, len(rows))
    options.update(placement=feature._placement, hotness="degree" if scores is None else scores.cpu())
    exponents, order = None, feature._order
    if feature._handle is not None:
        # A handle that is not opened yet has them too.
        exponents, order = feature._handle.exponents, feature._handle.order
    elif isinstance(feature.stored, MemoryRows):
        exponents = feature.stored.exponents
    # Bytes, as torch's tensors of float8 do not come out of a pickle.
    parts = [_detach(rows).view(-1).view(torch.uint8), None if exponents is None else _detach(exponents),
             None if order is None else _detach(order)]  # fmt: skip
    return open_saved, (type(feature), options, feature.dtype, rows.dtype, rows.shape, *parts)


def _detach(part: Tensor) -> Tensor:
    """Return a tensor on the CPU that owns all of its memory, because all of that memory is written."""
    part = part.cpu().contiguous()
    is_whole = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return part if is_whole else part.clone()


@ordinary_tensors()
def open_saved(kind: type[Any], options: dict[str, Any], dtype: torch.dtype, stored: torch.dtype, shape: torch.Size,
               content: Tensor, exponents: Tensor | None, order: Tensor | None) -> Any:  # fmt: skip
    """Return the feature of a file, on the current GPU, or on the CPU if there is no GPU."""
    feature = kind(device=resolve_device(None), **options)
    with feature._replacing():
        feature._take(content.view(stored).view(shape), dtype, exponents)
        feature._order = None if order is None else order.to(feature.device)
    return feature
