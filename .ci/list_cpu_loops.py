"""Write `cpu_loops.txt`, the CPU loops that a wheel holds compiled: what the small programs of `pyg-direct warm` call.

Run it after a change of a loop's arguments: `python .ci/list_cpu_loops.py`. It takes a minute or two.
"""

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pyg_direct.cli.small_programs import CASES, run_case
from pyg_direct.compiler.jit import CPU_KERNELS

warnings.simplefilter("ignore")
for name in CASES:
    run_case(name)
lines = sorted(line for kernel in CPU_KERNELS for line in kernel.list_compiled())
(ROOT / "pyg_direct/compiler/cpu_loops.txt").write_text("\n".join([*lines, ""]))
