"""One budget of GPU memory for the plans of a process: the ones used longest ago give their buffers back."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Protocol

import torch

# Share of a GPU's memory for buffers of plans; a plan that needs more than all of it still gets it.
_SHARE = 1 / 16


class Holder(Protocol):
    """A plan, as the budget sees it."""

    @property
    def num_bytes(self) -> int:
        """Bytes it holds."""

    def release(self) -> bool:
        """Give the buffers back, unless a batch is on its way in them; they are made again when needed."""


_HOLDERS: OrderedDict[int, weakref.ref[Holder]] = OrderedDict()


def touch(holder: Holder) -> None:
    """Note that a plan is used now."""
    number = id(holder)
    if number in _HOLDERS:
        _HOLDERS.move_to_end(number)
    else:
        _HOLDERS[number] = weakref.ref(holder, lambda _: _HOLDERS.pop(number, None))


def make_room(num_bytes: int, holder: Holder, device: torch.device, *, all_of_it: bool = False) -> None:
    """Let other plans give buffers back until `num_bytes` more fit the budget, or all of them (`all_of_it`)."""
    limit = 0 if all_of_it else int(_SHARE * torch.cuda.get_device_properties(device).total_memory)
    plans = [plan for plan in (ref() for ref in list(_HOLDERS.values())) if plan is not None]
    held = sum(plan.num_bytes for plan in plans) + num_bytes
    for plan in plans:
        if held <= limit:
            return
        if plan is not holder:
            before = plan.num_bytes
            held -= before if plan.release() else 0
