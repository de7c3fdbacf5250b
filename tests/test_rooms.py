"""Rooms are found if a program imported nothing but the package."""

import subprocess
import sys

import pyg_direct

ROOMS = ["datasets", "distributed", "dynamic", "errors", "loader", "nn", "sampler"]

# A process for each, as the first brings others along.
PROGRAM = f"""
import os
# Once, and not in each process that is forked.
import torch_geometric
import pyg_direct

for name in {ROOMS}:
    if os.fork() == 0:
        print(getattr(pyg_direct, name).__name__, flush=True)
        os._exit(0)
    os.wait()
"""


def test_rooms_are_found_where_only_the_package_was_imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)

    assert done.stdout.split() == [f"pyg_direct.{name}" for name in ROOMS], done.stderr
    assert set(ROOMS) <= set(dir(pyg_direct))
