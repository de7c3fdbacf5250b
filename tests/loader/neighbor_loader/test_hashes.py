"""The first 100 shuffled batches are those that a CPU gave, on every machine."""

import os

import pytest

from tests.batches import hash_batches
from tests.loader.hashes import iterate, join, load_data, read_kept

PLACES = [("cpu", "auto"), *(pytest.param("cuda", place, marks=pytest.mark.gpu) for place in ("cuda", "unified"))]


@pytest.mark.parametrize(("device", "placement"), PLACES)
def test_batches_of_the_generated_graph_are_those_kept(device, placement):
    check(*load_data(None), device, placement)


@pytest.mark.parametrize(("device", "placement"), PLACES)
def test_batches_of_ogbn_arxiv_are_those_kept(device, placement):
    folder = os.environ.get("PYG_DIRECT_DATA")
    if folder is None:
        pytest.skip("needs PYG_DIRECT_DATA, the folder of ogbn_arxiv")

    # Whatever its folder is called.
    check("ogbn_arxiv", load_data(folder)[1], device, placement)


def check(name, data, device, placement):
    expected_graph, expected_batches = read_kept()[name]
    assert hash_batches([data]) == expected_graph, "the graph itself differs"

    got = join([hash_batches([batch]) for batch in iterate(data, device, placement)])

    assert got == expected_batches
