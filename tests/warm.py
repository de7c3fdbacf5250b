"""Processes of Python that have imported torch, PyG and the command before they begin: forked, in a tenth of the time.

What `multiprocessing` forks ends without Python's own end, and shows errors its own way: these do as `python -m` does.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any


class WarmPython:
    """`python -m pyg_direct`, any number of times, one after the other.

    The environment is that of the beginning: what Python itself reads of it, as `PYTHONSAFEPATH`, cannot change.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._outputs = [folder / "stdout", folder / "stderr"]
        self._server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env=environment)  # fmt: skip

    def run(self, *arguments: object, cwd: object = None) -> subprocess.CompletedProcess[str]:
        """What `python -m pyg_direct *arguments` does in a folder, as `subprocess.run` tells it."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        given = {"arguments": [*map(str, arguments)], "folder": str(cwd or os.getcwd()),
                 "outputs": [*map(str, self._outputs)]}  # fmt: skip
        self._server.stdin.write(json.dumps(given) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(given["arguments"], code, *(path.read_text() for path in self._outputs))

    def end(self) -> None:
        """End the process that the others are forked from."""
        self._server.communicate()


def _serve() -> dict[str, Any]:
    """What is asked for, in each process that is forked for it."""
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            return json.loads(line)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


def _begin(given: dict[str, Any]) -> None:
    """Do what Python does before it runs a module."""
    os.chdir(given["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(given["outputs"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv[1:] = given["arguments"]
    sys.path[0] = given["folder"]


if __name__ == "__main__":
    import torch_geometric

    import pyg_direct.bench.measurements

    # What commands import when they run.
    import pyg_direct.cli.app
    import pyg_direct.cli.machine_report
    import pyg_direct.distributed.partitioning.partition_graph
    import pyg_direct.noedit.install

    assert torch_geometric
    assert pyg_direct.cli.app

    # At its end Python would look for what nobody uses in all that was imported, a second long.
    gc.freeze()
    _begin(_serve())
    runpy._run_module_as_main("pyg_direct")
