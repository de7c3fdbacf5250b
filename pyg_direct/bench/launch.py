"""Cost of a launch on the host: ours, found by dtypes or not, beside the driver's own call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import Any

import torch

from pyg_direct.bench.limits import wait_for_gpu, wake_core
from pyg_direct.bench.result_row import Row
from pyg_direct.compiler.code_cache import COMPILER
from pyg_direct.compiler.jit import THREADS
from pyg_direct.kernels.sampling.random import draw_bits_gpu
from pyg_direct.ops.run_kernel import _DISPATCHES, prepare_gpu, run_gpu
from pyg_direct.runtime.cuda.device import load_driver
from pyg_direct.runtime.cuda.launch import OPEN

# Fewer launches than the GPU queues, after which one waits for the GPU.
_COUNT = 200
_REPEATS = 100
_DRIVER = "the driver alone"
_NOTE = ("p20, p50, p80 of {repeats} times {count} launches on a core kept awake before each, as in training; in turns "
         "with the limit's")  # fmt: skip


def time_in_turns(ways: Mapping[str, Callable[[], object]], count: int = _COUNT, repeats: int = _REPEATS
                  ) -> dict[str, list[float]]:  # fmt: skip
    """Microseconds of a call of each way in each repeat, the mean of `count` calls in a row.

    The ways take turns, each time from another one on, so that other work of the host meets all alike. The core
    works for a while before the first repeat and for a moment before each way: one that has slept runs a third slower.
    """
    for call in ways.values():
        call()
    names, took = list(ways), {name: [0.0] * repeats for name in ways}
    wake_core()
    for repeat in range(repeats):
        for turn in range(len(names)):
            name = names[(turn + repeat) % len(names)]
            call = ways[name]
            wait_for_gpu()
            wake_core(2e-3)
            begin = perf_counter()
            for _ in range(count):
                call()
            took[name][repeat] = (perf_counter() - begin) / count * 1e6
    wait_for_gpu()
    return took


def measure_launch(open_other: Callable[[int, tuple[Any, ...]], Callable[[], object] | None] | None = None
                   ) -> Iterator[Row]:  # fmt: skip
    """Microseconds of Python for one launch on torch's current stream, with two arrays and two scalars.

    Beside it stands the driver's call alone, with all its arguments ready: the most of a launch, and another on each
    machine. The time that a launch adds to it is a row of its own.

    Args:
        open_other: Makes the same launch through another launcher, of the driver's handle of `draw_bits_gpu` and its
            arguments; None if there is none.
    """
    items = torch.arange(8, device="cuda")
    args = 7, items, 0, torch.empty_like(items)
    run_gpu(draw_bits_gpu, 1, *args)
    launcher = _DISPATCHES[draw_bits_gpu].launchers[items.device.index]
    handle, _, address = launcher.launch.bound[torch.cuda.current_stream().cuda_stream, get_ident()]  # type: ignore[attr-defined]
    enqueue, prepared = load_driver().cuLaunchKernel, prepare_gpu(draw_bits_gpu, 7, OPEN, 0, OPEN)
    # Numbers are settled by the second call.
    for _ in range(2):
        prepared(1, args[1::2])
    ways: dict[str, Callable[[], object]] = {
        _DRIVER: partial(enqueue, launcher.function, 1, 1, 1, THREADS, 1, 1, 0, handle, address, 0),
        "compiled kernel": partial(launcher.launch, 1, THREADS, args),
        "found by dtypes": partial(run_gpu, draw_bits_gpu, 1, *args),
        "arrays given, numbers settled": partial(prepared, 1, args[1::2])}  # fmt: skip
    yield from make_rows(time_in_turns(ways))
    # After the others, as it may end in an error there.
    other = open_other(int(launcher.function), args) if open_other is not None and COMPILER != "mlir" else None
    if other is not None:
        ways["through torch's launcher"] = other
        yield from list(make_rows(time_in_turns(ways)))[-2:]


def make_rows(took: dict[str, list[float]], count: int = _COUNT) -> Iterator[Row]:
    """Rows of each way, and of what each adds to the driver's call in the same repeat."""
    driver = took[_DRIVER]
    least, note = median(driver), _NOTE.format(count=count, repeats=len(driver))
    for what, micros in took.items():
        if what != _DRIVER:
            limit_name = "the driver's own call, through cuda.bindings"
            yield Row.of(f"launch/{what}", "time", "us", micros, least, limit_name, note)
            added = [ours - theirs for ours, theirs in zip(micros, driver, strict=True)]
            yield Row.of(f"launch/{what}", "time beside the driver's own call", "us", added, note=note)
