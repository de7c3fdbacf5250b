"""Matrix products by the faster of torch's libraries on this CPU, and of many rows of few columns on a GPU.

`torch.mm` calls MKL, which uses half the vector width on processors of other makers. oneDNN, with which torch runs its
own recurrent layers, does not, but its calls take longer to begin.
"""

from __future__ import annotations

import functools
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_direct.cache_folder import recall
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.profiling import time_call

# Products of numbers from which oneDNN may be faster.
_MANY = 2**21
# How many times as long `torch.mm` must take: the choice should not depend on other work of the machine at that moment.
_CLEARLY = 1.25
_ROUNDS = 20
# Pieces of rows whose products are added up in the end: a product of few columns uses few of a GPU's multiprocessors.
_PIECES = 512
_LEAST_ROWS = 64
# Sizes of the measurement.
_VERSION = 1


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.t() + bias` of `x` `[..., F]`, weight `[C, F]` and bias `[C]`, of one dtype: `[..., C]`.

    Has no gradient: for the passes of an `autograd.Function`.
    """
    if (
        x.dtype == torch.float32
        and x.numel() * weight.shape[0] >= _MANY
        and not x.is_cuda
        and torch._C._get_mkldnn_enabled()
        and _compare(torch.get_num_threads()) > _CLEARLY
    ):
        return _multiply_by_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def multiply_columns(left: Tensor, right: Tensor) -> Tensor:
    """Return `left.t() @ right` of `[N, A]` and `[N, B]`: `[A, B]`. Has no gradient."""
    rows = left.shape[0] // _PIECES
    if rows < _LEAST_ROWS or not runs_on_gpu(left):
        return left.t() @ right
    whole = rows * _PIECES
    pieces = [side[:whole].unflatten(0, (_PIECES, rows)) for side in (left, right)]
    out = torch.bmm(pieces[0].mT, pieces[1]).sum(0)
    return torch.addmm(out, left[whole:].t(), right[whole:]) if whole < left.shape[0] else out


def _multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # For weights whose rows or columns are not contiguous it has only a loop that takes a thousand times as long.
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    if x.stride(-1) != 1 and not x.mT.is_contiguous():
        x = x.contiguous()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@functools.cache
def _compare(num_threads: int) -> float:
    """Measure how many times as long as oneDNN `torch.mm` takes, at the first call on this machine; 0 without
    oneDNN.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0.0
    key = f"{torch.backends.cpu.get_cpu_capability()} x{num_threads}, torch {torch.__version__}, {_VERSION}"
    ratio: float = recall("products", key, _measure, lambda kept: isinstance(kept, float) and kept > 0)
    return ratio


def _measure() -> float:
    x, weight = torch.ones(4096, 64, device="cpu"), torch.ones(96, 64, device="cpu")
    least = [math.inf, math.inf]
    with torch.no_grad():
        for _ in range(_ROUNDS):
            # In turns, because other work of the machine comes and goes.
            for place, work in enumerate((F.linear, _multiply_by_onednn)):
                least[place] = min(least[place], time_call(partial(work, x, weight)))
    return least[0] / least[1]
