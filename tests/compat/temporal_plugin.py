"""A pytest plugin for PyTorch Geometric Temporal's own tests: our layers and streams in the place of its own."""

import torch_geometric_temporal.signal as signals

from pyg_direct.dynamic import patch, stream
from tests.compat.report import pytest_collectreport, pytest_runtest_logreport  # noqa: F401


def _wrap(cls):
    return lambda *args, **kwargs: stream(cls(*args, **kwargs), "cpu")


patch()
for name, value in list(vars(signals).items()):
    if isinstance(value, type) and hasattr(value, "snapshot_count"):
        setattr(signals, name, _wrap(value))
