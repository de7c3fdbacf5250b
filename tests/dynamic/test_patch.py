"""Layers under their own names in PyTorch Geometric Temporal, and restored; its own tests pass with them.

PYGT_TESTS names the folder `test` of a checkout of PyTorch Geometric Temporal.
"""

import os
from pathlib import Path

import pytest

from pyg_direct.dynamic import nn
from pyg_direct.dynamic.nn.accelerate_snapshots import patch, unpatch
from tests.compat.suite import run
from tests.compat.temporal import FILES

pytestmark = pytest.mark.temporal
TESTS = os.environ.get("PYGT_TESTS")


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
    results = run(Path(TESTS).resolve(), FILES, plugin="tests.compat.temporal_plugin")

    assert [result for result in results if result.outcome != "passed"] == []
    assert len(results) >= 69
