"""Rows of snapshots times small matrices: our kernel beside torch's products, and beside a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pyg_direct.bench.limits import device_copy_rate
from pyg_direct.bench.row import Row
from pyg_direct.bench.timing import time_on_clock, time_on_gpu
from pyg_direct.ops.product import multiply_rows, pull_matrix

# Numbers of a row before and after: EvolveGCN-O, T-GCN's three gates, and MPNN-LSTM's convolutions, hidden size 32.
SIZES = ((2, 2), (4, 4), (8, 8), (16, 16), (4, 96), (16, 96), (4, 32), (32, 32))


def measure_products(num_rows: int, sizes: tuple[tuple[int, int], ...] = SIZES) -> Iterator[Row]:
    """Seconds of both directions for `num_rows` rows; the limit is a copy of what is read and written."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    measure = partial(time_on_gpu, repeats=9, queued=5) if device == "cuda" else partial(time_on_clock, repeats=3)
    limit = device_copy_rate() / 1e12 if device == "cuda" else None
    for depth, width in sizes:
        x, grad = torch.randn(num_rows, depth, device=device), torch.randn(num_rows, width, device=device)
        weight, bias = torch.randn(width, depth, device=device), torch.randn(width, device=device)
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(multiply_rows(x, weight, bias, is_turned=True), expected, rtol=1e-3, atol=1e-3)
        ways = {
            "rows": (
                partial(multiply_rows, x, weight, bias, is_turned=True),
                partial(torch.nn.functional.linear, x, weight, bias),
            ),
            "gradient of the matrix and the bias": (
                partial(pull_matrix, x, grad, is_turned=True),
                lambda x=x, grad=grad: (grad.t() @ x, grad.sum(0)),
            ),
            "gradient of the rows": (
                partial(multiply_rows, grad, weight),
                lambda grad=grad, weight=weight: grad @ weight,
            ),
        }
        moved = 4 * num_rows * (depth + width)
        for name, (ours, theirs) in ways.items():
            case = f"products/{num_rows} rows, {depth} to {width}/{name}"
            mine, others = measure(ours), measure(theirs)
            yield Row.of(case, "ours", "ms", [1e3 * s for s in mine])
            yield Row.of(case, "torch", "ms", [1e3 * s for s in others])
            yield Row.of(case, "ours, read and written", "TB/s", [moved / s / 1e12 for s in mine], limit, "device copy")
            yield Row.of(case, "torch over ours", "x",
                         [a / b for a, b in zip(sorted(others), sorted(mine), strict=True)])  # fmt: skip
