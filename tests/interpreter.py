"""Fresh interpreters that see the package without its own __init__, which would import PyG and so Numba."""

import os
import subprocess
import sys
from pathlib import Path

import pyg_direct

PACKAGE = Path(pyg_direct.__file__).parent
BARE_PACKAGE = f"""
import sys, types
package = sys.modules["pyg_direct"] = types.ModuleType("pyg_direct")
package.__path__ = [{str(PACKAGE)!r}]
"""


def run_together(count, text, **environment):
    """Standard outputs of `count` fresh interpreters that start at once."""
    started = [
        subprocess.Popen([sys.executable, "-c", BARE_PACKAGE + text], env={**os.environ, **environment},
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]  # fmt: skip
    outputs = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0] * count, "\n".join(error for _, error in outputs)
    return [output.strip() for output, _ in outputs]


def run_python(text, **environment):
    """Standard output of a fresh interpreter."""
    return run_together(1, text, **environment)[0]
