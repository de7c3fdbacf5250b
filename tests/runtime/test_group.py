"""What one process of a host gives the others of its group."""

import pytest
import torch

from pyg_direct.errors import ArgumentError, PygDirectError
from pyg_direct.runtime.group import give_to_host, has_group, identify_host
from pyg_direct.runtime.shared import share
from tests.processes import run_ranks


def give(rank):
    made = give_to_host(lambda about: (about, share(torch.arange(5) + rank)), f"process {rank}")
    about, memory = made

    def fail(_):
        raise ArgumentError(f"ids must be known to process {rank}")

    try:
        give_to_host(fail, None)
    except PygDirectError as error:
        return about, memory.view(torch.int64, (5,)).tolist(), type(error).__name__, str(error)


@pytest.mark.slow
def test_the_first_process_makes_it_and_its_errors_reach_all():
    results = run_ranks(give, 3)

    assert [result[:2] for result in results] == [(["process 0", "process 1", "process 2"], [0, 1, 2, 3, 4])] * 3
    assert results[0][2:] == ("ArgumentError", "ids must be known to process 0")
    for kind, words in (result[2:] for result in results[1:]):
        assert kind == "PygDirectError"
        assert "process 0 failed" in words
        assert "ids must be known to process 0" in words


def test_a_process_alone_has_no_group():
    assert not has_group()
    assert identify_host() == identify_host()
