"""The example of a graph in parts, with two processes on the CPU, as a user starts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_two_processes_learn():
    environment = {k: v for k, v in os.environ.items() if k != "PYG_DIRECT_DATA"}
    environment |= {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, EXAMPLES / "distributed_worker.py", "--processes", "2", "--device", "cpu", "--scale",
               "0.003", "--epochs", "4", "--batch-size", "32"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)

    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+), ", done.stdout, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < 0.85 * losses[0], done.stdout
    assert float(re.search(r"test ([\d.]+)%", done.stdout)[1]) > 15, done.stdout
