"""Comparison of tensor contents: torch counts writes to a tensor, but no writes through NumPy or `.data`."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
# Seconds that NumPy adds up in a process before the loops are read from the wheel, or compiled.
_NUMPY_SECONDS = 0.1
# The same if Numba is not imported yet: batches of GPU kernels need no compiler.
_LONE_SECONDS = 0.5
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
    """Read the contents of a tensor, an array, or a sparse tensor; empty for any other object."""
    parts = [_read_words(part) for part in _list_parts(value)]
    return Content(_read_form(value), _sum_parts(parts, _FEW_PIECES, _FEW_BYTES),
                   _sum_parts(parts, _PIECES, WHOLE_BYTES))  # fmt: skip


def has_content(value: Any, known: Content) -> bool:
    """Report whether a tensor still has known contents, as far as `WHOLE_BYTES` and `glance_only` allow a check."""
    return have_contents([value], [known])


def have_contents(values: Sequence[Any], known: Sequence[Content]) -> bool:
    """Report whether tensors still have known contents, see `has_content`; in less time than one after the other."""
    if any(_read_form(value) != content.form for value, content in zip(values, known, strict=True)):
        return False
    parts = [[_read_words(part) for part in _list_parts(value)] for value in values]
    if getattr(_HURRY, "is_on", False):
        return all(_sum_parts(own, _FEW_PIECES, _FEW_BYTES) == content.glance
                   for own, content in zip(parts, known, strict=True))  # fmt: skip
    sums = _sum_whole([part for own in parts for part in own])
    return all(_sum_parts(own, _PIECES, WHOLE_BYTES, sums) == content.sum
               for own, content in zip(parts, known, strict=True))  # fmt: skip


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


def _sum_parts(parts: list[Tensor], pieces: int, whole_bytes: int, known: Mapping[int, int] | None = None) -> int:
    """Sum parts of a value; `known` are sums of some, by the id of the part."""
    total = 0
    for part in parts:
        found = None if known is None else known.get(id(part))
        total = total * 31 + (_sum_bytes(part, pieces, whole_bytes) if found is None else found)
    return total


def _sum_whole(parts: list[Tensor]) -> dict[int, int]:
    """Sum the parts on the CPU that are compared as a whole, by one loop, if loops are used: by the id of the part."""
    whole = [part for part in parts if not part.is_cuda and _WORD <= part.numel() <= WHOLE_BYTES]
    if len(whole) < 2 or not _is_by_loops():
        return {}
    return dict(zip(map(id, whole), _sum_by_loop(whole), strict=True))


def _sum_by_loop(parts: Sequence[Tensor]) -> list[int]:
    """Sum the mixed words of each part, of at least one, with the few bytes after its last whole word."""
    counts = [part.numel() // _WORD for part in parts]
    places = np.array([(part.data_ptr(), count) for part, count in zip(parts, counts, strict=True)], np.int64)
    with threads_for(sum(counts)):
        sums = np.empty((len(parts), cpu_chunks()), np.uint64)
        run_cpu(kernels.sum_all_cpu, places, _list_factors(), sums)
    return [int(total) + _read_tail(part) for total, part in zip(sums.sum(1), parts, strict=True)]


def _read_tail(part: Tensor) -> int:
    """Read the bytes after the last whole word as a number."""
    rest = part[part.numel() // _WORD * _WORD :]
    return int.from_bytes(bytes(rest.tolist()), "little") if rest.numel() else 0


def _is_by_loops() -> bool:
    """Report whether loops add up, for which a short program would wait longer than for NumPy."""
    return _Spent.seconds >= (_NUMPY_SECONDS if "numba" in sys.modules else _LONE_SECONDS)


def _sum_bytes(flat: Tensor, pieces: int, whole_bytes: int) -> int:
    """Sum the mixed words of these bytes, with the few bytes after the last whole word."""
    count, tail = flat.numel() // _WORD, _read_tail(flat)
    if count == 0:
        return tail
    is_whole = flat.numel() <= whole_bytes
    if flat.is_cuda:
        return _sum_on_gpu(flat[: count * _WORD], pieces, is_whole) + tail
    words = flat[: count * _WORD].numpy().view(np.uint64)
    if not _is_by_loops():
        begin = time.perf_counter()
        total = _sum_by_numpy(words, pieces, is_whole)
        _Spent.seconds += time.perf_counter() - begin
        return total + tail
    if is_whole:
        return _sum_by_loop([flat])[0]
    with threads_for(pieces * _LENGTH):
        sums = np.empty(cpu_chunks(), np.uint64)
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
