"""The gated step of T-GCN with its gradient: by one kernel or some between its products, and by torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from pyg_direct.bench.limits import device_copy_rate, time_on_clock, time_on_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.ops.snapshots.run_recurrent_cells import is_narrow, step_folded, step_folded_by_torch, step_gated


def measure_gated_steps(num_nodes: int, name: str, channels: int, features: int = 4,
                        device: str = "cuda") -> Iterator[Row]:  # fmt: skip
    """Measure a step of `num_nodes` nodes, forward and with the gradients of state and weights.

    Args:
        num_nodes: Number of nodes N.
        name: Name of a graph with as many nodes.
        channels, features: Width of a state, and of the aggregated features.
        device: A device; on a CPU only torch's functions are measured.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(num_nodes, features), (num_nodes, channels), (channels + features + 1, 3 * channels)]
    values = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    grad = torch.randn(num_nodes, channels, generator=generator, device=device)
    ways: dict[str, Callable[..., Tensor]] = {"torch's functions": step_folded_by_torch}
    if is_narrow(*values[:2]):
        ways["one kernel"] = step_folded
    elif device == "cuda":
        ways["kernels between products"] = _step_between
    for step in ways.values():
        torch.testing.assert_close(step(*values), step_folded_by_torch(*values), rtol=1e-4, atol=1e-4)
    for value in values[1:]:
        value.requires_grad_()
    row_bytes = 4 * num_nodes
    for what, numbers in (("forward", features + 2 * channels), ("with gradients", 2 * features + 5 * channels)):
        medians = []
        for way, step in ways.items():
            work = partial(_run, step, values, None if what == "forward" else grad)
            seconds = time_on_gpu(work, 10, 3, 3) if device == "cuda" else time_on_clock(work, 5, 1)
            medians.append(median(seconds))
            limit = 1e3 * row_bytes * numbers / device_copy_rate() if device == "cuda" else None
            yield Row.of(f"gated/{name}/{channels} channels/{what}", way, "ms", [1e3 * s for s in seconds], limit,
                         "what goes in and comes out, at a copy's rate" if limit else "")  # fmt: skip
        if len(medians) == 2:
            yield Row.of(f"gated/{name}/{channels} channels/{what}", "torch's functions over ours", "x",
                         [medians[0] / medians[1]])  # fmt: skip


def _step_between(x: Tensor, state: Tensor, weights: Tensor) -> Tensor:
    channels = state.shape[1]
    of_state, of_x, bias = weights.split([channels, x.shape[1], 1])
    return step_gated(x, state, of_x.t(), bias[0], *of_state.split([2 * channels, channels], 1))


def _run(step: Callable[..., Tensor], values: list[Tensor], grad: Tensor | None) -> None:
    if grad is None:
        with torch.no_grad():
            step(*values)
    else:
        torch.autograd.grad(step(*values), values[1:], grad)
