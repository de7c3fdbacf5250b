"""Random walks, tensors in and tensors out (see `kernels/sampling/walks.py`)."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import THREADS
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.kernels.sampling.walks import (
    RESIDENT,
    WEIGHT_BITS,
    flag_outside_gpu,
    walk_by_weight_gpu,
    walk_by_weight_wide_gpu,
    walk_cpu,
    walk_evenly_gpu,
    walk_evenly_wide_gpu,
)
from pyg_direct.ops.argument_checks import (
    check_below,
    check_ids,
    check_key,
    check_number,
    check_same_device,
)
from pyg_direct.ops.run_kernel import grid_for, run_cpu, run_gpu, runs_on_gpu, shared_grid, threads_for
from pyg_direct.ops.sampling.find_induced import NeighborLists
from pyg_direct.runtime.cuda.launch import current_stream, kept_stream, set_stream
from pyg_direct.runtime.host.tensor_views import ordinary_tensors

_MOST_LENGTH = 2**31 - 1
# Weights of neighbors that are equally likely.
_EVENLY = (1 << WEIGHT_BITS,) * 3


def walk(lists: NeighborLists, start: Tensor, walk_length: int, p: float = 1.0, q: float = 1.0, *, key: int,
         is_sorted: bool = False) -> Tensor:  # fmt: skip
    """Walk from each start: at random along edges, or as node2vec does (Grover and Leskovec, KDD 2016).

    A neighbor is taken in proportion to a weight: 1 / p for the way back, 1 for a neighbor of the node before, 1 / q
    for any other. Each of parallel edges counts. Weights are rounded to 2**-31 of the largest. If a node has no
    neighbors, the walk stays there.

    Args:
        lists: Rows of neighbors, with ids within [0, N), which is not checked.
        start: First nodes, int64 or int32 `[W]`; a CPU checks that they lie in [0, N).
        walk_length: Steps, at least 0.
        p, q: Finite and above 0.
        key: Unsigned 64-bit key; equal keys give equal walks on any device. Walk number w draws for itself.
        is_sorted: The neighbors of each row ascend, which makes a search for one of them faster.

    Returns:
        The nodes of each walk, int64 `[W, walk_length + 1]`, on the device of the rows.
    """
    check_walk_length(walk_length)
    return _walk(lists, start, None, walk_length, lists.num_nodes, _weigh(p, q), key, stays=True, is_sorted=is_sorted)


def walk_along(lists: NeighborLists, start: Tensor, rows: Tensor, num_nodes: int, *, key: int) -> Tensor:
    """Walk from each start along a sequence of relations, at random among the neighbors in each.

    Args:
        lists: Rows of all relations, relation after relation, with ids within the types that they lead to; which are
            not checked.
        start: First nodes, ids within their type, int64 or int32 `[W]`; a CPU checks that they lie in [0, num_nodes).
        rows: First row of the relation of each step, int64 `[L]`, on the device of the rows; not checked.
        num_nodes: Nodes of the first type.
        key: Unsigned 64-bit key, as in `walk`.

    Returns:
        Ids within their types, int64 `[W, L + 1]`; -1 after a node without neighbors.
    """
    return _walk(lists, start, rows, rows.numel(), num_nodes, (1, 1, 1), key, stays=False, is_sorted=False)


def _walk(lists: NeighborLists, start: Tensor, rows: Tensor | None, length: int, num_nodes: int,
          weights: tuple[int, int, int], key: int, *, stays: bool, is_sorted: bool) -> Tensor:  # fmt: skip
    """Walk; without `rows` nodes are rows."""
    start = check_ids("start", start, num_nodes)
    check_same_device("start", start, "indptr", lists.indptr)
    check_key("key", key)
    out = torch.empty(start.numel(), length + 1, dtype=torch.int64, device=start.device)
    if out.numel() == 0:
        return out
    if runs_on_gpu(start):
        start = start.long()
        is_narrow = lists.neighbors.dtype is torch.int32
        if weights[0] == weights[1] == weights[2]:
            kernel = walk_evenly_gpu if is_narrow else walk_evenly_wide_gpu
            run_gpu(kernel, shared_grid(start, start.numel(), THREADS, RESIDENT), lists.indptr, lists.neighbors,
                    lists.step, _no_rows(start.device) if rows is None else rows, length, int(stays), key, start,
                    out)  # fmt: skip
        else:
            kernel = walk_by_weight_gpu if is_narrow else walk_by_weight_wide_gpu
            # More blocks than run at once: one that took few tries makes room for the next.
            run_gpu(kernel, grid_for(start.numel(), start), lists.indptr, lists.neighbors, lists.step, length,
                    *weights, int(is_sorted), key, start, out)  # fmt: skip
        return out
    out[:, 0] = start
    if length > 0:
        rows = torch.zeros(length, dtype=torch.int64, device=start.device) if rows is None else rows
        arguments = (lists.indptr, lists.neighbors, lists.step, rows, int(stays), *weights, int(is_sorted))
        with threads_for(out.numel()):
            run_cpu(walk_cpu, *arguments, np.uint64(key), out.view(-1))
    return out


class BoundsCheck:
    """Check that ids on a GPU lie in [0, upper), made beside the work that the host enqueues before `finish`.

    So neither that work nor its launch waits for the check. Ids on the CPU are not checked here: `check_ids` does that.

    Args:
        name: Argument that holds the ids, for the error.
        ids: int64 or int32 `[n]`, contiguous, written by the current stream.
    """

    def __init__(self, name: str, ids: Tensor, upper: int) -> None:
        self._name, self._ids, self._upper = name, ids, upper
        self._own: _Flag | None = None
        if runs_on_gpu(ids) and ids.numel() > 0:
            index = ids.get_device()
            # A thread waits for its check before it begins another one, so that one flag is enough for it.
            flags = _OWN.__dict__.setdefault("flags", {})
            self._own = flags.get(index) or flags.setdefault(index, _make_flag(index))
            if self._own.beside is not None:
                self._own.event.record(current_stream(index))

    def finish(self) -> None:
        """Make the check, and wait for it.

        Raises:
            IdError: an id is not in [0, upper).
        """
        if self._own is None:
            return
        flag, word, event, beside = self._own
        word[0] = 0
        if beside is None:
            self._launch(flag)
        else:
            event.wait(beside)
            with kept_stream(self._ids.get_device()):
                set_stream(beside)
                self._launch(flag)
            event.record(beside)
            event.synchronize()
        if word[0] != 0:
            check_below(self._name, self._ids.cpu().numpy(), self._upper)

    def _launch(self, flag: Tensor) -> None:
        run_gpu(flag_outside_gpu, grid_for(self._ids.numel(), self._ids), self._ids, self._upper, flag)


class _Flag(NamedTuple):
    """A word that a GPU sets, and the stream that does so.

    Attributes:
        flag, word: int64 `[1]`, page-locked, as a tensor and as an array.
        event: After the ids are written, then after the check; None in the simulator.
        beside: None in the simulator.
    """

    flag: Tensor
    word: np.ndarray
    event: Any
    beside: torch.cuda.Stream | None


# Of each thread: `flags` by number of the GPU, which streams and events belong to.
_OWN = threading.local()


def _make_flag(index: int) -> _Flag:
    is_gpu = index >= 0
    with ordinary_tensors():
        flag = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=is_gpu)
    # With priority: its few blocks start before the rest of the work that it is beside.
    beside = torch.cuda.Stream(index, priority=-1) if is_gpu else None
    return _Flag(flag, flag.numpy(), torch.cuda.Event() if is_gpu else None, beside)


@functools.cache
def _no_rows(device: torch.device) -> Tensor:
    """An empty list of rows, int64."""
    with ordinary_tensors():
        return torch.empty(0, dtype=torch.int64, device=device)


def check_walk_length(walk_length: int) -> int:
    """Check the steps of a walk."""
    if isinstance(walk_length, bool) or not isinstance(walk_length, (int, np.integer)):
        raise ArgumentTypeError(f"walk_length must be an integer, got {walk_length!r}")
    if not 0 <= walk_length <= _MOST_LENGTH:
        raise ArgumentError(f"walk_length must lie in [0, 2**31), got {walk_length}")
    return int(walk_length)


def check_bias(name: str, value: float) -> float:
    """Check `p` or `q` of node2vec."""
    if not 0 < check_number(name, value) < math.inf:
        raise ArgumentError(f"{name} must be finite and above 0, got {value!r}")
    return float(value)


def _weigh(p: float, q: float) -> tuple[int, int, int]:
    """Return weights of the way back, of common neighbors and of others, the largest 2**31, no weight 0."""
    if type(p) is type(q) is float and p == q == 1:
        return _EVENLY
    given = 1 / check_bias("p", p), 1.0, 1 / check_bias("q", q)
    most, one = max(given), 1 << WEIGHT_BITS
    if not math.isfinite(most):
        raise ArgumentError(f"p and q must be above 1e-307, got {p!r} and {q!r}")
    back, near, far = (max(1, round(weight / most * one)) for weight in given)
    return back, near, far
