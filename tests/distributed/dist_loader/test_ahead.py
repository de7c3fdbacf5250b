"""Batches whose rows are known ahead are those of one machine, and rows that several of them read travel once."""

import itertools
import warnings

import pytest
import torch

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.distributed.dist_loader import DistLinkNeighborLoader, DistNeighborLoader
from pyg_direct.distributed.row_foresight import PlannedRows
from pyg_direct.errors import ArgumentError, LoaderWarning
from tests.distributed.dist_loader.test_loader import LINK_CASES, NODE_CASES, assert_typed, make_typed_loaders, write_types
from tests.distributed.dist_loader.test_loader import make_loader
from tests.distributed.ranks import COMMON, as_dict, assert_equal, assert_in_turn, make_data, open_graph, write_data
from tests.processes import run_ranks

TIMED = [name for name in (*NODE_CASES, *LINK_CASES) if "time" in name or "weight" in name]
PLAIN = [name for name in (*NODE_CASES, *LINK_CASES) if name not in TIMED and name != "transformed"]


def foresee(kind, ahead):
    return lambda *args, **options: kind(*args, **options, ahead=ahead)


def run_cases(rank, folder):
    """Batches of two epochs of each case, and its report."""
    found = {}
    for place, names in (("p", PLAIN), ("timed", TIMED)):
        with open_graph(folder / place) as graph:
            for name in names:
                loader = make_loader(name, graph, foresee(DistNeighborLoader, 5), foresee(DistLinkNeighborLoader, 5))
                loader.record()
                found[name] = [[as_dict(batch) for batch in loader] for _ in range(2)], str(loader.tell())
    return found


def test_batches_of_all_options_are_those_of_one_machine(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 2)
    write_data(tmp_path / "timed", data, 2, times=True, weights=True)

    ranks = run_ranks(run_cases, 2, tmp_path)

    for name in (*PLAIN, *TIMED):
        alone = make_loader(name, data, NeighborLoader, LinkNeighborLoader)
        for epoch in range(2):
            assert_in_turn([found[name][0][epoch] for found in ranks], alone)
        for _, report in (found[name] for found in ranks):
            assert "rows of other parts for planned batches: " in report
