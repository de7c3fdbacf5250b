"""Imported last by the process that others are forked from. They then find the loops of loaders ready, and need not
each read them from the disk.
"""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from numba.np.ufunc.parallel import _set_init_process_lock
from torch_geometric.data import Data

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.compiler.jit import run_alone
from tests.hetero_data import make_hetero


def make_loaders() -> Iterator[Any]:
    """Loaders whose batches take the loops that many tests need."""
    data = Data(x=torch.zeros(9, 2), edge_index=torch.arange(9).repeat(2, 1), edge_attr=torch.zeros(9, 2))
    options: dict[str, Any] = {"batch_size": 3, "device": "cpu", "shuffle": True, "seed": 0, "prefetch": 0}
    yield NeighborLoader(data, [2, -1], **options)
    yield NeighborLoader(make_hetero(), [2, -1], "paper", **options)
    yield LinkNeighborLoader(data, [2, -1], neg_sampling="binary", **options)


# Numba makes its lock here, and none of the others names one.
_set_init_process_lock()
# Without threads, which a fork would not have.
was_alone = run_alone(True)
for loader in make_loaders():
    next(iter(loader))
run_alone(was_alone)
# Imported objects stay shared: garbage collection would write to them.
gc.freeze()
