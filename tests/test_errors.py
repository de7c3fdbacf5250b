"""Warnings are told at the line of the user's that led to them."""

import warnings

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.datasets import synthetic_graph
from pyg_direct.errors import LoaderWarning, warn
from pyg_direct.runtime.mode import ordinary_tensors


@pytest.mark.parametrize("function", [warn, ordinary_tensors()(warn), ordinary_tensors()(ordinary_tensors()(warn))],
                         ids=["plain", "decorated", "twice"])  # fmt: skip
def test_the_line_outside_of_the_package_is_named(function):
    with pytest.warns(UserWarning, match="said") as caught:
        function("said", UserWarning)

    assert [warning.filename for warning in caught] == [__file__]


def test_each_line_of_a_program_is_told_once():
    data = synthetic_graph("products", scale=1e-4).to_data()

    def load():
        return NeighborLoader(data, [2], torch.arange(4), device="cpu", num_workers=2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            load()
        NeighborLoader(data, [2], torch.arange(4), device="cpu", num_workers=2)

    lines = [warning.lineno for warning in caught if warning.category is LoaderWarning]
    assert len(lines) == len(set(lines)) == 2
