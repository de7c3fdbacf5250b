"""Comparison of tensor contents: torch counts writes to a tensor, but no writes through NumPy or `.data`."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels import content_hash as kernels
from pyg_direct.ops.run_kernel import cpu_chunks, run_cpu, threads_for

# Bytes up to which a whole tensor is compared at the start of an epoch; of a larger one, samples are.
WHOLE_BYTES = 32 << 20
# Runs of words that are read from a larger tensor; and in a hurry, from a tensor of more than so many bytes.
_PIECES, _FEW_PIECES, _LENGTH, _FEW_BYTES = 4096, 256, 16, 64 << 10
_WORD = 8
# Seconds that NumPy adds up in a process before the loops are compiled or read, which takes as long.
_NUMPY_SECONDS = 0.5
_HURRY = threading.local()


class Content(NamedTuple):
    """Contents of a tensor, or of the tensors that a sparse one is made of.

    Attributes:
        glance: Sum of a few samples; of all bytes if the tensor is small.
        sum: Sum of all bytes, or of more samples if the tensor is large.
    """

    form: tuple[Any, ...]
    glance: int
    sum: int


@contextmanager
def glance_only() -> Iterator[None]:
    """Compare only a few samples in the block, in some ten microseconds, for calls that make one batch."""
    before, _HURRY.is_on = getattr(_HURRY, "is_on", False), True
    try:
        yield
    finally:
        _HURRY.is_on = before


def read_content(value: Any) -> Content:
    """Read the contents of a tensor, an array, or a sparse tensor of torch or torch_sparse; empty for any other
    object.
    """
    parts = [_read_words(part) for part in _list_parts(value)]
    return Content(_read_form(value), _sum_parts(parts, _FEW_PIECES, _FEW_BYTES),
                   _sum_parts(parts, _PIECES, WHOLE_BYTES))  # fmt: skip


def has_content(value: Any, known: Content) -> bool:
    """Report whether a tensor still has known contents, as far as `WHOLE_BYTES` and `glance_only` allow a check."""
    if _read_form(value) != known.form:
        return False
    parts = [_read_words(part) for part in _list_parts(value)]
    if getattr(_HURRY, "is_on", False):
        return _sum_parts(parts, _FEW_PIECES, _FEW_BYTES) == known.glance
    return _sum_parts(parts, _PIECES, WHOLE_BYTES) == known.sum


def _list_parts(value: Any) -> list[Tensor]:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value) if min(value.strides, default=0) >= 0 else torch.from_numpy(value.copy())
    if isinstance(value, Tensor):
        if getattr(value, "is_unified", False):
            # Its memory, after the GPU has written to it.
            value = value.on_cpu()  # type: ignore[attr-defined]
        if value.layout == torch.strided:
            value = value.as_tensor() if hasattr(value, "as_tensor") else value
            return [value.detach().resolve_conj().resolve_neg()]
        if value.layout == torch.sparse_csr:
            return [value.crow_indices(), value.col_indices()]
        return []
    return [*value.csr()[:2]] if hasattr(value, "csr") and hasattr(value, "storage") else []


def _read_form(value: Any) -> tuple[Any, ...]:
    return tuple((tuple(part.shape), part.stride(), part.dtype) for part in _list_parts(value))


def _read_words(part: Tensor) -> Tensor:
    """Return the bytes of a tensor, and the bytes between them, uint8."""
    if part.numel() == 0 or part.is_meta:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    span = 1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
    return part.as_strided((span,), (1,)).view(torch.uint8)


def _sum_parts(parts: list[Tensor], pieces: int, whole_bytes: int) -> int:
    total = 0
    for part in parts:
        total = total * 31 + _sum_bytes(part, pieces, whole_bytes)
    return total


def _sum_bytes(flat: Tensor, pieces: int, whole_bytes: int) -> int:
    """Sum the mixed words of these bytes, with the few bytes after the last whole word."""
    count = flat.numel() // _WORD
    rest = flat[count * _WORD :]
    tail = int.from_bytes(bytes(rest.tolist()), "little") if rest.numel() else 0
    if count == 0:
        return tail
    is_whole = flat.numel() <= whole_bytes
    if flat.is_cuda:
        return _sum_on_gpu(flat[: count * _WORD], pieces, is_whole) + tail
    words = flat[: count * _WORD].numpy().view(np.uint64)
    looked_at = count if is_whole else pieces * _LENGTH
    if sys.modules.get("numba") is None or _Spent.seconds < _NUMPY_SECONDS:
        # Batches of GPU kernels need no compiler, and a short program would wait longer for it than for NumPy.
        begin = time.perf_counter()
        total = _sum_by_numpy(words, pieces, is_whole)
        _Spent.seconds += time.perf_counter() - begin
        return total + tail
    with threads_for(looked_at):
        sums = np.empty(cpu_chunks(), np.uint64)
        if is_whole:
            run_cpu(kernels.sum_all_cpu, words, _list_factors(), sums)
        else:
            run_cpu(kernels.sum_some_cpu, words, pieces, _LENGTH, _list_factors(), sums)
    return int(sums.sum()) + tail


class _Spent:
    """Seconds that NumPy has added up in this process."""

    seconds = 0.0


def _sum_by_numpy(words: np.ndarray, pieces: int, is_whole: bool) -> int:
    """Return the result of the loops, by steps of NumPy."""
    block, total, one = kernels.BLOCK, 0, np.uint64(1)
    if not is_whole:
        part = len(words) // pieces
        numbers = np.arange(pieces, dtype=np.uint64)
        firsts = numbers * np.uint64(part) + _mix(numbers) % np.uint64(part - _LENGTH + 1)
        places = (firsts[:, None] + np.arange(_LENGTH, dtype=np.uint64)).reshape(-1)
        inner, own = places % np.uint64(block), words[places.astype(np.int64)]
        return int(((own ^ (own >> np.uint64(32))) * (_mix(inner) | one) * (_mix(places - inner) | one)).sum())
    folded, factors = np.empty(block, np.uint64), _list_factors()
    for begin in range(0, len(words), block):
        own = words[begin : begin + block]
        now = np.right_shift(own, np.uint64(32), out=folded[: len(own)])
        np.bitwise_xor(now, own, out=now)
        # In less time than by `np.dot`, which takes integers one by one.
        np.multiply(now, factors[: len(own)], out=now)
        total += int(now.sum()) * (int(_mix(np.array([begin], np.uint64))[0]) | 1)
    # It wraps around, as the sums of the loops do.
    return total % 2**64


@functools.cache
def _list_factors() -> np.ndarray:
    """List the odd numbers of the positions within a block, uint64 `[BLOCK]`."""
    return _mix(np.arange(kernels.BLOCK, dtype=np.uint64)) | np.uint64(1)


def _mix(places: np.ndarray) -> np.ndarray:
    """Mix positions as `mix_place` of `kernels/content_hash.py` does, in arrays."""
    mixed = (places + np.uint64(1)) * kernels._STEP
    mixed = (mixed ^ (mixed >> np.uint64(32))) * kernels._FACTOR
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _sum_on_gpu(flat: Tensor, pieces: int, is_whole: bool) -> int:
    """Sum on a GPU, by steps of torch; samples differ from the samples of a CPU."""
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    words = flat.view(torch.int64)
    if not is_whole:
        part = words.numel() // pieces
        words = words[: pieces * part].view(pieces, part)[:, part // 2 : part // 2 + _LENGTH].reshape(-1)
    step, factor = (int(value) - 2**64 for value in (kernels._STEP, kernels._FACTOR))
    mixed = words + torch.arange(1, words.numel() + 1, device=words.device) * step
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * factor
    return int((mixed ^ ((mixed >> 29) & (2**35 - 1))).sum())
