"""Arrays in memory shared by all processes of a graph in parts, and the check if they can share memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_direct.runtime.comm.communicator import Communicator
from pyg_direct.runtime.comm.host_group import identify_host
from pyg_direct.runtime.cuda.peer_memory import p2pCliqueTopo
from pyg_direct.runtime.host.host_memory import available_bytes
from pyg_direct.runtime.host.shared_memory import SharedMemory, open_shared

# Share of the free host memory that a graph may take.
_SHARE = 0.8


class Shape(NamedTuple):
    """Dtype and sizes of an array."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


def tell(communicator: Communicator, value: Any) -> list[Any]:
    """Gather a JSON value of each process in all processes, by rank. Collective, in the communicator's turn."""
    message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    answers = communicator.exchange([message] * communicator.size, "words")
    return [json.loads(bytes(answer.tolist())) for answer in answers]


def share_arrays(communicator: Communicator, shapes: Sequence[Shape]) -> list[Tensor]:
    """Allocate arrays of zeros in shared memory, made by rank 0. Collective, in the communicator's turn.

    Raises:
        OSError: the system does not allow shared memory between the processes.
    """
    own = [SharedMemory(shape.num_bytes) for shape in shapes] if communicator.rank == 0 else []
    process, descriptors = tell(communicator, [os.getpid(), [memory.descriptor for memory in own]])[0]
    if communicator.rank > 0:
        own = [open_shared(process, descriptor, shape.num_bytes)
               for descriptor, shape in zip(descriptors, shapes, strict=True)]  # fmt: skip
    # Rank 0 keeps them alive until all processes have opened them.
    communicator.agree(0)
    return [memory.view(*shape) for memory, shape in zip(own, shapes, strict=True)]


def find_obstacle(communicator: Communicator, num_bytes: int = 0) -> str | None:
    """Find the reason why the processes cannot keep a graph in one memory; None if they can.

    The result is equal in all processes. Collective, in the communicator's turn.

    Args:
        num_bytes: Host memory that the whole graph takes in addition to the parts.
    """
    device = communicator.device
    name = "" if device.type == "cpu" else _name_gpu(device.index or 0)
    told = tell(communicator, [identify_host(), device.type, device.index or 0, name])
    obstacle = _compare(told) or (_compare_gpus(told) if device.type == "cuda" else None)
    # Other processes may number the GPUs differently.
    obstacle = next((words for words in tell(communicator, obstacle) if words is not None), None)
    return _try_memory(communicator, num_bytes) if obstacle is None else obstacle


def _compare(told: list[list[Any]]) -> str | None:
    host, kind = told[0][:2]
    for rank, (other, other_kind, *_) in enumerate(told):
        if other != host:
            return f"rank {rank} is on another host than rank 0"
        if other_kind != kind:
            return f"rank {rank} is on a {other_kind} device, rank 0 on {kind}"
    return None


def _compare_gpus(told: list[list[Any]]) -> str | None:
    indices = [index for *_, index, _ in told]
    if len(told) != dist.get_world_size():
        return "the group is not that of all processes, which memory of GPUs is given out in"
    for rank, (*_, index, name) in enumerate(told):
        if index >= torch.cuda.device_count() or _name_gpu(index) != name:
            return f"GPU {index} of rank {rank} has another number in other processes"
        if index in indices[:rank]:
            return f"ranks {indices.index(index)} and {rank} are on the same GPU"
    cliques = list(p2pCliqueTopo(indices).p2p_clique.values())
    return None if len(cliques) == 1 else f"GPUs {cliques[0][0]} and {cliques[1][0]} are not joined by NVLink"


def _name_gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _try_memory(communicator: Communicator, num_bytes: int) -> str | None:
    """Try to open a small piece of shared memory, and check for enough free memory."""
    own = SharedMemory(1)
    process, descriptor, room = tell(communicator, [os.getpid(), own.descriptor, int(_SHARE * available_bytes())])[0]
    if num_bytes > room:
        return f"it takes {num_bytes} bytes of host memory to put the graph together, which has {room} to give"
    words = None
    try:
        open_shared(process, descriptor, 1)
    except OSError as error:
        words = f"rank {communicator.rank} cannot open the memory of rank 0: {error}"
    return next((found for found in tell(communicator, words) if found is not None), None)
