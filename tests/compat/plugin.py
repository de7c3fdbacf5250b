"""A pytest plugin for PyG's own tests: our loaders in the place of PyG's, and results written down.

Loaded by `-p tests.compat.plugin` before the tests import anything. Cora is a generated graph of its shape, so
that no network is needed.
"""

import sys
from functools import partial
from importlib.util import find_spec

if find_spec("pytorch_lightning") is not None:
    # PyG prefers the data modules of `lightning`, which the trainers of its tests do not know.
    sys.modules["lightning"] = None  # type: ignore[assignment]

import torch
import torch_geometric.loader as loaders
import torch_geometric.nn as models
import torch_geometric.nn.models.tgn as tgn
import torch_geometric.testing as testing
import torch_geometric.testing.decorators as decorators
import torch_geometric.typing as settings
from torch_geometric.datasets import Planetoid

import pyg_direct
from tests.compat.datasets import make_cora
from tests.compat.report import pytest_collectreport, pytest_runtest_logreport  # noqa: F401


def _split_publicly(data):  # type: ignore[no-untyped-def]
    """140 nodes to train on, 500 to validate and the last 1,000 to test, as Cora has them."""
    place = torch.arange(data.num_nodes)
    data.train_mask, data.val_mask = place < 140, (place >= 140) & (place < 640)
    data.test_mask = place >= data.num_nodes - 1000
    return data


# Ours needs neither pyg-lib nor torch-sparse: tests that ask for pyg-lib's sampler, for a METIS of PyG's or, where we
# need none, for torch-sparse are tests of ours. Where PyG's own is reached all the same, it fails for lack of these, so
# that none of its passes count as ours.
SETTINGS = ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE")
has_package = decorators.has_package

for name in SETTINGS:
    setattr(settings, name, True)
decorators.WITH_PYG_LIB = True
decorators.has_package = lambda package: package == "pyg_lib" or has_package(package)
testing.withMETIS = lambda test: test
with_package = testing.withPackage


def _ask_for_packages(*packages):  # type: ignore[no-untyped-def]
    name = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]
    return with_package(*[package for package in packages if (package, name) != ("torch_sparse", "test_graph_saint")])


testing.withPackage = _ask_for_packages
Planetoid.download = lambda self: None
Planetoid.process = lambda self: self.save([_split_publicly(make_cora())], self.processed_paths[0])
pyg_direct.install(device="data")

# `install` does not replace the classes of continuous time yet; the data of their tests lies on the CPU.
loaders.TemporalDataLoader = partial(pyg_direct.TemporalDataLoader, device="cpu")
models.TGNMemory, tgn.LastNeighborLoader = pyg_direct.TGNMemory, pyg_direct.LastNeighborLoader
