"""Write the CPU loops that the programs of `small_programs.py` call: `cpu_loops.txt` and `cpu_programs.txt`.

A wheel holds the former compiled. The latter has a line for each program: its part, then its loops. By it `pyg-direct
warm` finds the loops of a part, and progress of compiling is counted. Run it after a change of a loop's arguments:
`python .ci/list_cpu_loops.py`. It takes a minute or two.
"""

import itertools
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import small_programs

from pyg_direct.compiler import jit

# Loops that each program has called, by case and place there; -1 is the whole case.
programs: dict[tuple[str, int], set[str]] = {}
running: list[set[str]] = []
call_loop = jit.CpuKernel.__call__


def call(kernel, *args):
    for loops in running:
        loops.add(kernel.title)
    return call_loop(kernel, *args)


def record(function):
    """Let each call of a function of the small programs be a program."""

    def run(*args):
        running.append(programs.setdefault((case, next(places)), set()))
        function(*args)
        running.pop()

    return run


def begin(run):
    """Let a case be run from its first place on, as `run_case` does several times."""

    def run_case():
        global places
        places = itertools.count()
        running[:] = [programs.setdefault((case, -1), set())]
        run()

    return run_case


jit.CpuKernel.__call__ = call
read, small_programs._train = record(small_programs._read), record(small_programs._train)
small_programs._read = lambda *loaders: [read(loader) for loader in loaders]
small_programs.CASES |= {name: begin(run) for name, run in small_programs.CASES.items()}
warnings.simplefilter("ignore")
for case in small_programs.CASES:
    small_programs.run_case(case)
    if (case, 0) in programs:
        del programs[case, -1]
lines = sorted(line for kernel in jit.CPU_KERNELS for line in kernel.list_compiled())
different = dict.fromkeys(" ".join([name, *sorted(loops)]) for (name, _), loops in programs.items() if loops)
folder = ROOT / "pyg_direct/compiler"
(folder / "cpu_loops.txt").write_text("\n".join([*lines, ""]))
(folder / "cpu_programs.txt").write_text("\n".join([*different, ""]))
