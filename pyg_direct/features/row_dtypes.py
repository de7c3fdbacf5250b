"""Rows stored in fewer bits than they are used in: half or a quarter of the bytes over the link and in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.rows.gather_rows import STORED
from pyg_direct.progress import Bar
from pyg_direct.runtime.host.host_memory import use_large_pages

# Numbers narrowed at a time, so that temporary memory is small beside the table.
_CHUNK = 1 << 24
# Limits of the exponent of a float8 row: every number in it is then a normal float32 or zero.
_LEAST_EXPONENT, _MOST_EXPONENT = -117, 119
_BIAS = 127


def check_store_dtype(store_dtype: torch.dtype | None) -> None:
    """Refuse a dtype that rows cannot be stored in."""
    if store_dtype is None:
        return
    if not isinstance(store_dtype, torch.dtype):
        raise ArgumentTypeError(f"store_dtype must be a torch.dtype, got {store_dtype!r}")
    if store_dtype not in STORED:
        raise ArgumentError(f"store_dtype must be one of {', '.join(map(str, STORED))}, got {store_dtype}")


def narrow_rows(rows: Tensor, store_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return (rows in `store_dtype`, exponents of float8 rows), on the device of `rows`; equal on every device.

    A row of float8_e4m3fn is divided by the power of two that makes its largest number just fit; `gather_rows`
    multiplies by it again. The exponents are uint8 `[N]`, biased by 127.

    Args:
        rows: float32 `[N, ...]`.
    """
    _check_dtype(rows, store_dtype)
    stored = use_large_pages(torch.empty(rows.shape, dtype=store_dtype, device=rows.device))
    scaled = store_dtype == torch.float8_e4m3fn
    exponents = torch.empty(len(rows), dtype=torch.uint8, device=rows.device) if scaled else None
    with Bar(len(rows), f"narrowing rows to {str(store_dtype).removeprefix('torch.')}", "rows") as bar:
        for begin, piece in _list_pieces(rows):
            step = len(piece)
            if exponents is None:
                _check_range(piece, store_dtype)
                stored[begin : begin + step] = piece
            else:
                stored[begin : begin + step], exponents[begin : begin + step] = _scale_rows(piece)
            bar.update(step)
    return stored, exponents


def check_narrow(rows: Tensor, store_dtype: torch.dtype) -> None:
    """Refuse rows as `narrow_rows` does, without converting them. `rows`: float32 `[N, ...]`."""
    _check_dtype(rows, store_dtype)
    for _, piece in _list_pieces(rows):
        if store_dtype == torch.float8_e4m3fn:
            _check_finite(piece.isinf())
        else:
            _check_range(piece, store_dtype)


def _list_pieces(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Return (first row, rows) of some rows at a time."""
    step = max(1, _CHUNK * len(rows) // max(1, rows.numel()))
    for begin in range(0, len(rows) if rows.numel() else 0, step):
        yield begin, rows[begin : begin + step]


def _check_dtype(rows: Tensor, store_dtype: torch.dtype) -> None:
    if rows.dtype != torch.float32:
        raise ArgumentError(f"store_dtype={store_dtype} needs rows of torch.float32, got {rows.dtype}")


def _check_finite(is_inf: Tensor) -> None:
    if bool(is_inf.any()):
        raise ArgumentError("store_dtype=torch.float8_e4m3fn holds finite numbers and NaN only, got an infinity")


def _check_range(rows: Tensor, store_dtype: torch.dtype) -> None:
    most = torch.finfo(store_dtype).max
    low, high = rows.aminmax()
    # Also false for a NaN; an infinity stays infinite.
    if bool((low >= -most) & (high <= most)):
        return
    lost = rows[rows.isfinite() & rows.to(store_dtype).isinf()]
    if lost.numel() > 0:
        raise ArgumentError(f"store_dtype={store_dtype} holds numbers up to {most:g}, got {lost[0].item():g}")


def _scale_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (float8 rows, their exponents)."""
    flat = rows.reshape(len(rows), -1)
    most = torch.finfo(torch.float8_e4m3fn).max
    low, high = flat.aminmax(dim=1)
    size = torch.maximum(-low, high)
    if bool(size.isnan().any()):
        # A NaN has no size: it stays one whatever its row is divided by.
        size = flat.nan_to_num(0.0, torch.inf, -torch.inf).abs().amax(1)
    _check_finite(size.isinf())
    share, exponent = torch.frexp(size / most)
    exponent = (exponent - (share == 0.5).int()).clamp(_LEAST_EXPONENT, _MOST_EXPONENT).int()
    # Powers of two from their bits, as a computed power need not be exact.
    factor = ((_BIAS - exponent) << 23).view(torch.float32)
    narrow = (flat * factor[:, None]).clamp_(-most, most).to(torch.float8_e4m3fn)
    return narrow.view(rows.shape), (exponent + _BIAS).to(torch.uint8)
