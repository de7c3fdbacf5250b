"""Edges sorted by target, rows to reduce over them, and how near results must be."""

import numpy as np
import torch

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.kernels.aggregate.sum import LONG_ROW
from pyg_direct.ops.local_ids.build_csr import compress_ids

NUM_ROWS, NUM_TARGETS = 12, 9
TOLERANCE = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-4, 1e-5), torch.float16: (2e-2, 2e-2),
             torch.bfloat16: (2e-2, 2e-2)}  # fmt: skip


class Graph:
    """Edges sorted by target: repeated ones, targets without any, and perhaps one with half of all."""

    def __init__(self, device="cpu", num_edges=40, hub=False, seed=0):
        random = np.random.default_rng(seed)
        target = random.integers(0, NUM_TARGETS - 2, num_edges)
        if hub:
            target[: num_edges // 2] = 4
        target = torch.from_numpy(np.sort(target))
        self.target, self.indptr = target.to(device), compress_ids(target, NUM_TARGETS).to(device)
        self.row = torch.from_numpy(random.integers(0, NUM_ROWS, num_edges)).to(device)

    def numpy(self):
        return self.indptr.tolist(), self.row.tolist()


def make_rows(width, dtype=torch.float32, device="cpu", num_rows=NUM_ROWS):
    # Few values, so that maxima have equals.
    return torch.randint(-4, 5, (num_rows, width)).to(dtype).div(4).to(device)


def hub_edges():
    return 12 * LONG_ROW if SIMULATED else 40 * LONG_ROW


def assert_near(got, expected, dtype=torch.float32):
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got.double().cpu(), torch.as_tensor(expected).double().cpu(), rtol=rtol, atol=atol)
