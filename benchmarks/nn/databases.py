"""Steps of programs that train on a relational database, as RelBench's: plain, and started by `pyg_direct run`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

from torch_geometric.typing import WITH_PYG_LIB

from benchmarks.nn.unedited import run_program
from pyg_direct.bench.result_row import Row

TASKS = ("entity", "recommendation")
_PROGRAM = Path(__file__).with_name("database_program.py")


def measure_databases(scale: float, tasks: tuple[str, ...] = TASKS, workers: tuple[int, ...] = (0, 8), steps: int = 80,
                       window: int = 20, size: int = 512) -> Iterator[Row]:  # fmt: skip
    """Measure steps with their batches, a process for each way.

    The recommendation program of RelBench forks its workers for every epoch; steps of its first epoch are measured, so
    that this start is left out. Time is a mean over windows of more steps than the workers prefetch.

    Args:
        scale: Factor on tables of rel-amazon's shape.
        tasks: Programs of `database_program.py`.
        workers: Numbers of PyG's workers. Started by `run`, the programs have none.
        steps: Steps of a process; windows of the first half are left out, as graphs are recorded in it.
        window: Steps of a window.
        size: Seeds of a batch.

    Raises:
        RuntimeError: a program failed, as without PyTorch Frame.
    """
    for task in tasks:
        case = f"databases/rel-amazon's shape x {scale:g}/{task}"
        best: float | None = None
        # PyG samples by time through pyg-lib alone.
        for count in workers if WITH_PYG_LIB else ():
            made = run_program([str(_PROGRAM), task, str(scale), str(count), str(steps), str(size)])
            times = _find_windows(made["seconds"], steps, window)
            yield Row.of(case, f"step, plain, {count} workers", "ms", times, note=_describe(made["losses"]))
            best = min(best or mean(times), mean(times))
        made = run_program(["-m", "pyg_direct", "run", str(_PROGRAM), task, str(scale), "0", str(steps), str(size)])
        times = _find_windows(made["seconds"], steps, window)
        yield Row.of(case, "step, run", "ms", times, note=f"{_describe(made['losses'])}; replayed {made['replayed']}")
        if best is not None:
            yield Row.of(case, "step, plain at its best over run", "x", [best / one for one in times],
                         note=f"best of {', '.join(map(str, workers))} workers")  # fmt: skip


def _find_windows(seconds: list[float], steps: int, window: int) -> list[float]:
    late = seconds[steps // 2 :]
    return [1e3 * mean(late[at : at + window]) for at in range(0, len(late) - window + 1, window)]


def _describe(losses: list[float]) -> str:
    return f"losses {losses[0]:.4f} to {median(losses[-10:]):.4f}"
