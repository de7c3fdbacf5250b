"""Which GPUs of this host read each other's memory, and over what: the cliques that share a cache.

Names of Quiver (`p2pCliqueTopo`, `init_p2p`) and of graphlearn-for-pytorch (`DeviceGroup`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError
from pyg_direct.runtime.device import bind_thread, resolve_device
from pyg_direct.runtime.dlpack import view_address
from pyg_direct.runtime.driver import call, load_driver

_ALREADY_ENABLED = 704


class Link(NamedTuple):
    """How one GPU reaches another.

    Attributes:
        can_read: Its kernels can read the other's memory in place.
        is_nvlink: Over NVLink, at several times the rate of a PCIe link.
    """

    can_read: bool
    is_nvlink: bool


class DeviceGroup:
    """GPUs that share a cache, named by hand.

    Args:
        group_id: A number of the caller's.
        device_list: GPU indices.

    Raises:
        ArgumentError, ArgumentTypeError: `device_list` is none of different GPU indices.
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

    Any number of any size; a GPU that is linked to no other is alone in one.

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
            ArgumentError: the GPU is none of those of the topology.
        """
        for number, clique in self.p2p_clique.items():
            if device_id in clique:
                return number
        raise ArgumentError(f"device_id must be one of the devices of the topology, got {device_id}")

    def info(self) -> str:
        """A line for each clique."""
        return "\n".join(f"clique {number}: GPUs {', '.join(map(str, c))}" for number, c in self.p2p_clique.items())

    def __repr__(self) -> str:
        return f"p2pCliqueTopo({list(self.p2p_clique.values())})"


def check_devices(device_list: Sequence[int], name: str = "device_list") -> list[int]:
    """A list of different GPU indices, as it was given, an argument of this name.

    Raises:
        ArgumentError, ArgumentTypeError: it is none.
    """
    devices = list(device_list) if isinstance(device_list, (Sequence, set, frozenset)) else []
    if not devices or any(isinstance(d, bool) or not isinstance(d, int) or d < 0 for d in devices):
        raise ArgumentTypeError(f"{name} must hold GPU indices, at least one, got {device_list!r}")
    if len(set(devices)) < len(devices):
        raise ArgumentError(f"{name} must hold every GPU once, got {devices}")
    return devices


def find_cliques(devices: Sequence[int], is_linked: Callable[[int, int], bool]) -> list[list[int]]:
    """Disjoint groups of `devices`, largest first, in which every one is linked to every other in both directions.

    Of groups of one size, the one with the first devices is taken, so that all processes find the same.
    """
    both = {frozenset(pair) for pair in combinations(devices, 2) if is_linked(*pair) and is_linked(*reversed(pair))}
    left, cliques = list(devices), []
    while left:
        cliques.append(_largest(left, both))
        left = [device for device in left if device not in cliques[-1]]
    return sorted(cliques, key=lambda clique: devices.index(clique[0]))


def _largest(devices: Sequence[int], linked: set[frozenset[int]]) -> list[int]:
    """The largest group of linked devices."""
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
    """How GPU `reader` reaches the memory of GPU `owner`, from the driver."""
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
    """Let kernels of a GPU read the memory of another one, in this process; whether they can."""
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
    """Memory of a GPU as a tensor of another one, uint8 `[n]`.

    Raises:
        DeviceError: it cannot read the other's memory.
    """
    assert device.index is not None
    if flat.numel() == 0:
        return flat.new_empty(0, device=device)
    if not open_pair(device.index, flat.device.index):
        raise DeviceError(f"device must be a GPU that can read the memory of {flat.device}, got {device}")
    return view_address(flat.data_ptr(), flat.numel(), device, flat)
