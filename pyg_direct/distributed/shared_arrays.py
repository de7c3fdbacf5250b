"""Whether the processes of a graph in parts can keep it in one memory, and arrays that all of them see."""

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
from pyg_direct.runtime.host.memory import available_bytes
from pyg_direct.runtime.host.shared_memory import SharedMemory, open_shared

# Of the host memory that is free, what a graph may take.
_SHARE = 0.8


class Shape(NamedTuple):
    """Of an array: its dtype and sizes."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of it."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


def tell(communicator: Communicator, value: Any) -> list[Any]:
    """What each process tells all others, by rank; JSON. Collective, in the communicator's turn."""
    message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    answers = communicator.exchange([message] * communicator.size, "words")
    return [json.loads(bytes(answer.tolist())) for answer in answers]


def share_arrays(communicator: Communicator, shapes: Sequence[Shape]) -> list[Tensor]:
    """Arrays of zeros that all processes of a host see, made by the first one. Collective, as `tell`.

    Raises:
        OSError: the system keeps the processes apart.
    """
    own = [SharedMemory(shape.num_bytes) for shape in shapes] if communicator.rank == 0 else []
    process, descriptors = tell(communicator, [os.getpid(), [memory.descriptor for memory in own]])[0]
    if communicator.rank > 0:
        own = [open_shared(process, descriptor, shape.num_bytes)
               for descriptor, shape in zip(descriptors, shapes, strict=True)]  # fmt: skip
    # The first one keeps them until all have them.
    communicator.agree(0)
    return [memory.view(*shape) for memory, shape in zip(own, shapes, strict=True)]


def find_obstacle(communicator: Communicator, num_bytes: int = 0) -> str | None:
    """Why the processes cannot keep a graph in one memory, the same words in all of them; None where they can.

    Collective, as `tell`.

    Args:
        communicator: The way to the others.
        num_bytes: Host memory that it takes beyond what the parts would take.
    """
    device = communicator.device
    name = "" if device.type == "cpu" else _name_gpu(device.index or 0)
    told = tell(communicator, [identify_host(), device.type, device.index or 0, name])
    obstacle = _compare(told) or (_compare_gpus(told) if device.type == "cuda" else None)
    # GPUs may be seen in another way by others.
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
    """A piece of memory that is opened before much is, and whether there is as much."""
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
