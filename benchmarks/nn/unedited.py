"""Epochs of unedited programs that train on a whole graph: plain, and started by `pyg_direct run`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from pyg_direct.bench.result_row import Row

PROGRAMS = ("gcn", "gat", "hetero_conv", "hgt", "rgcn")
# Of programs whose epochs by PyG take seconds.
_MOST_EPOCHS = {"rgcn": 20}
_PROGRAM = Path(__file__).with_name("unedited_program.py")
_WAYS = {"plain": [], "run": ["-m", "pyg_direct", "run"]}


def measure_unedited(names: tuple[str, ...] = PROGRAMS, epochs: int = 200, turns: int = 2) -> Iterator[Row]:
    """Measure epochs, each a step and a test, in processes that take turns.

    Losses of each process, its median and its replayed passes stand in the notes: processes differ more than epochs.

    Args:
        names: Programs of `unedited_program.py`.
        epochs: Epochs of a process, at most. Graphs are recorded in the first ones.
        turns: Processes of each way.

    Raises:
        RuntimeError: a program failed.
    """
    for name in names:
        count = min(epochs, _MOST_EPOCHS.get(name, epochs))
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
        for _ in range(turns):
            for way, prefix in _WAYS.items():
                found[way].append(run_program([*prefix, str(_PROGRAM), name, str(count)]))
        # The first epochs have other work too.
        first = count // 2 if count < epochs else count // 10
        late = {way: [[1e3 * one for one in made["seconds"][first:]] for made in runs] for way, runs in found.items()}
        times = {way: [one for part in parts for one in part] for way, parts in late.items()}
        for way, runs in found.items():
            losses = ", ".join(f"{made['losses'][0]:.5f} to {made['losses'][-1]:.5f}" for made in runs)
            medians = ", ".join(f"{median(part):.2f}" for part in late[way])
            replayed = ", ".join(str(made["replayed"]) for made in runs)
            note = f"losses {losses}; medians {medians}; replayed {replayed}"
            yield Row.of(f"unedited/{name}", f"epoch, {way}", "ms", times[way], note=note)
        yield Row.of(f"unedited/{name}", "epoch, plain over run", "x",
                     [median(times["plain"]) / one for one in times["run"]])  # fmt: skip


def run_program(args: list[str]) -> dict[str, Any]:
    """Run a Python program that prints its times as one line of JSON; returns these, and its number of replayed passes.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(args)} must end without an error, got {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    replayed = re.search(r"(\d+) passes of models replayed", done.stderr)
    return {**found, "replayed": int(replayed[1]) if replayed else 0}
