"""Draws and permutations as functions of a key (see `kernels/sampling/random.py`)."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.kernels.batch_counters import SHUFFLE_DRAW
from pyg_direct.kernels.sampling.random import (
    draw_bits_cpu,
    draw_bits_gpu,
    draw_bounded_cpu,
    draw_bounded_gpu,
    draw_until_cpu,
    draw_until_gpu,
)
from pyg_direct.ops.argument_checks import check_ids, check_key
from pyg_direct.ops.run_kernel import grid_for, run_cpu, run_gpu, runs_on_gpu, threads_for
from pyg_direct.typing import Device

_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def derive_key(key: int, item: int, slot: Any) -> Any:
    """Return `draw(key, item, slot)` in Python integers: an unsigned 64-bit key for the purpose that `item` and `slot`
    number.

    If slots are a NumPy array, uint64, return the key of each.
    """
    c0, c1 = item & _MASK, (item >> 32) & _MASK
    c2, c3 = slot & _MASK, (slot >> 32) & _MASK
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        low, high = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK, (low >> 32) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0 | (c1 << 32)


def draw_bits(items: Tensor, *, key: int, slot: int = 0) -> Tensor:
    """Draw 64 random bits for each item, as int64 `[n]` on the device of `items`.

    Args:
        items: int64 `[n]`.
        key: Unsigned 64-bit key; equal keys give equal bits on any device.
    """
    items = check_ids("items", items).long()
    return _draw_each(draw_bits_gpu, draw_bits_cpu, items, key, slot, torch.empty_like(items))


def draw_below(items: Tensor, bound: int, *, key: int, slot: int = 0) -> Tensor:
    """Draw a uniform integer in [0, bound) for each item, int64 `[n]` on the device of `items`.

    Args:
        items: int64 `[n]`.
        bound: At least 1.
        key: Unsigned 64-bit key; equal keys give equal integers on any device.
    """
    items = check_ids("items", items).long()
    if bound < 1:
        raise ArgumentError(f"bound must be at least 1, got {bound}")
    return _draw_each(draw_bounded_gpu, draw_bounded_cpu, items, key, slot, bound, torch.empty_like(items))


def draw_until(items: Tensor, times: Tensor, order: Tensor, until: Tensor, *, key: int, slot: int = 0
               ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw for each item one of the entries present by a time, uniformly. Return the entries, int64 `[n]`, and True if
    there was one, bool `[n]`.

    If no entry is present by then, the earliest one is returned.

    Args:
        items: int64 `[n]`.
        times: Time from which each entry is present, ascending, int64 `[N]`, N > 0.
        order: Entries to draw, in the order of these times, int64 `[N]`.
        until: The time of each item, int64 `[n]`.
        key: Unsigned 64-bit key; equal keys give equal draws on any device.
    """
    items, until = check_ids("items", items).long(), until.contiguous()
    out, is_timely = torch.empty_like(items), torch.empty(items.shape, dtype=torch.uint8, device=items.device)
    _draw_each(draw_until_gpu, draw_until_cpu, items, key, slot, times, order, until, out, is_timely)
    return out, is_timely.view(torch.bool)


def _draw_each(kernel: Any, loop: Any, items: Tensor, key: int, *args: Any) -> Tensor:
    """Draw for each item where the items lie; the result is the last argument."""
    check_key("key", key)
    if items.numel() > 0 and runs_on_gpu(items):
        run_gpu(kernel, grid_for(items.numel(), items), key, items, *args)
    elif items.numel() > 0:
        with threads_for(items.numel()):
            run_cpu(loop, np.uint64(key), items, *args)
    return cast(Tensor, args[-1])


def permute(count: int, *, key: int, device: Device = "cpu") -> Tensor:
    """Return a uniform permutation of 0 .. count-1, int64 `[count]` on the CPU: positions in the order of their draws.

    Args:
        key: Unsigned 64-bit key; equal keys give equal permutations.
    """
    bits = draw_bits(torch.arange(count, device=device), key=check_key("key", key), slot=SHUFFLE_DRAW)
    return bits.sort(stable=True).indices.cpu()
