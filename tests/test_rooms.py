"""Rooms are found where a program imported nothing but the package."""

import subprocess
import sys

import pytest

import pyg_direct


@pytest.mark.parametrize("name", ["datasets", "distributed", "dynamic", "errors", "loader", "nn", "sampler"])
def test_a_room_is_found_where_only_the_package_was_imported(name):
    program = f"import pyg_direct; print(pyg_direct.{name}.__name__)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)

    assert done.stdout.strip() == f"pyg_direct.{name}", done.stderr
    assert name in dir(pyg_direct)
