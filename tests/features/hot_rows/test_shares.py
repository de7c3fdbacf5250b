"""One budget goes to the rows that are read most for their bytes."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import ArgumentError
from pyg_direct.features.hot_rows import Demand, share_budget

tables = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=8), st.sampled_from([1, 4, 6])), max_size=3)


def share_slowly(tables, budget):
    rows = [(-reads / row_bytes, number, row_bytes) for number, (all_reads, row_bytes) in enumerate(tables)
            for reads in all_reads]  # fmt: skip
    taken = [0] * len(tables)
    for _, number, row_bytes in sorted(rows, key=lambda row: row[0]):
        budget -= row_bytes
        if budget < 0:
            break
        taken[number] += row_bytes
    return taken


@given(tables=tables, budget=st.integers(0, 60))
def test_shares_are_those_of_one_row_after_the_other(device, tables, budget):
    demands = {str(number): Demand(torch.tensor(reads, dtype=torch.float32, device=device), size)
               for number, (reads, size) in enumerate(tables)}  # fmt: skip

    assert list(share_budget(demands, budget).values()) == share_slowly(tables, budget)


@pytest.mark.parametrize("budget", [640, "640B", "52.7%"])
def test_wide_rows_are_weighed_by_their_bytes(budget):
    nodes, edges = Demand(torch.tensor([0.9, 0.5]), 512), Demand(torch.tensor([0.2, 0.1, 0.001]), 64)

    assert share_budget({"x": nodes, "edge_attr": edges}, budget) == {"x": 512, "edge_attr": 128}


def test_a_budget_that_is_none_is_named():
    with pytest.raises(ArgumentError, match="feature_cache must be at most 100%"):
        share_budget({"x": Demand(torch.ones(2), 4)}, "120%")
