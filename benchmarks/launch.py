"""Launch of a kernel through torch's own launcher of compiled kernels, which stands beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pyg_direct.compiler.jit import THREADS
from pyg_direct.kernels.sampling.random import draw_bits_gpu
from pyg_direct.ops.run_kernel import run_gpu


def launch_by_torch(function: int, args: tuple[Any, ...]) -> Callable[[], object] | None:
    """Make the same launch through torch's own launcher of compiled kernels; None if torch has no such launcher.

    Args:
        function: The driver's handle of `draw_bits_gpu`, as numba-cuda compiles it.
    """
    launcher = getattr(torch._C, "_StaticCudaLauncher", None)
    if launcher is None:
        return None
    launch, stream = launcher._launch_kernel, torch._C._cuda_getCurrentRawStream
    key, items, slot, out = args
    index = items.device.index

    def call() -> None:
        size, length, at, target = 8, items.numel(), items.data_ptr(), out.data_ptr()
        values = (key, 0, 0, length, size, at, length, size, slot, 0, 0, length, size, target, length, size)
        launch(function, 1, 1, 1, THREADS // 32, 0, "KKKllKlllKKllKll", values, stream(index))

    run_gpu(draw_bits_gpu, 1, *args)
    expected = out.clone()
    out.fill_(-1)
    try:
        call()
    except (RuntimeError, TypeError):
        # Another torch takes other arguments.
        return None
    return call if torch.equal(out, expected) else None
