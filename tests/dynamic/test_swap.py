"""Layers under their own names in PyTorch Geometric Temporal, and back; its own tests pass with them.

PYGT_TESTS names the folder `test` of a checkout of PyTorch Geometric Temporal.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_direct.dynamic import nn
from pyg_direct.dynamic.swap import patch, unpatch

pytestmark = pytest.mark.temporal
TESTS = os.environ.get("PYGT_TESTS")
# Without those that download data.
FILES = ["recurrent_test.py", "batch_test.py", "heterogeneous_test.py"]


def test_names_are_replaced_and_given_back():
    import torch_geometric_temporal.nn as package
    from torch_geometric_temporal.nn import recurrent

    before = recurrent.TGCN
    try:
        assert patch() == sorted(nn.__all__)
        assert recurrent.TGCN is package.TGCN is nn.TGCN
    finally:
        unpatch()
    assert recurrent.TGCN is package.TGCN is before


@pytest.mark.skipif(not TESTS, reason="needs PYGT_TESTS, the folder of PyTorch Geometric Temporal's tests")
@pytest.mark.slow
def test_their_own_tests_pass():
    code = "import sys, pytest; from pyg_direct.dynamic.swap import patch; patch(); sys.exit(pytest.main(sys.argv[1:]))"
    files = [str(Path(TESTS) / name) for name in FILES]

    done = subprocess.run([sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", "--rootdir", TESTS, *files],
                          capture_output=True, text=True, timeout=280, check=False,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})  # fmt: skip

    assert done.returncode == 0, done.stdout[-3000:]
