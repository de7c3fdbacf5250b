"""Memory of rows that are not hot for the GPUs of a host, and the messages about it; with GPUs that do not exist."""

import logging
from types import SimpleNamespace

import pytest
import torch

from pyg_direct.errors import PlacementWarning
from pyg_direct.features import hot_rows, process_sharing
from pyg_direct.features.process_sharing import choose_cold, make_handle
from pyg_direct.runtime.cuda.peer_memory import GRANULE

ROWS = torch.arange(40_000 * 32).view(40_000, 32).float()


@pytest.fixture
def machine(monkeypatch):
    """Fake GPUs that read unified memory in place, on a host with 100 bytes free."""
    found = SimpleNamespace(free=100, unified={0: True, 1: True})
    monkeypatch.setattr(process_sharing, "available_bytes", lambda: found.free)
    monkeypatch.setattr(
        process_sharing, "abilities", lambda index: SimpleNamespace(managed_without_migration=found.unified[index])
    )
    monkeypatch.setattr(hot_rows, "free_bytes", lambda index: 1 << 30)
    return found


@pytest.mark.parametrize(("policy", "num_bytes", "expected"), [
    # Two copies in four fifths of the free memory.
    ("auto", 40, "unified"), ("auto", 41, "pinned"), ("unified", 1000, "unified"), ("pinned", 1, "pinned"),
])  # fmt: skip
def test_each_process_has_a_copy_where_the_host_has_room(machine, policy, num_bytes, expected):
    assert choose_cold(policy, num_bytes, [0, 1]) == expected


def test_rows_are_page_locked_where_one_gpu_would_move_unified_memory(machine):
    machine.unified[1] = False

    assert choose_cold("auto", 1, [0, 1]) == "pinned"
    assert choose_cold("auto", 1, [0]) == "unified"


@pytest.mark.parametrize("policy", ["device_replicate", "p2p_clique_replicate"])
def test_gpus_that_read_no_peer_have_hot_rows_each(machine, policy, caplog):
    heat = torch.arange(len(ROWS)).flip(0)

    with caplog.at_level(logging.INFO, "pyg_direct"):
        made = make_handle(ROWS.clone(), torch.float32, None, heat, GRANULE, [[0], [1]], policy=policy,
                           cold_policy="auto")  # fmt: skip

    groups = [[0], [1]] if policy == "p2p_clique_replicate" else [[0, 1]]
    assert [hot.devices for hot in made.hot] == groups
    assert [(hot.count, hot.spread) for hot in made.hot] == [(GRANULE // 128, None)] * len(groups)
    assert made.cold == "pinned"
    assert torch.equal(made.rows, ROWS)
    # The choice, and the bytes that it takes.
    line = caplog.messages[-1]
    assert line.startswith("40000 rows of 128 bytes: GPUs ")
    assert line.count("16384 hot rows each") == len(groups)
    assert line.endswith("the others pinned, 0.0 GB of host memory in 0 + 1 copies")


def test_copies_for_each_process_are_told(machine, caplog):
    machine.free = 1 << 40

    with caplog.at_level(logging.INFO, "pyg_direct"):
        made = make_handle(ROWS.clone(), torch.float32, None, None, 0, [[0, 1]], policy="device_replicate",
                           cold_policy="auto")  # fmt: skip

    assert made.cold == "unified"
    assert caplog.messages[-1].endswith("the others unified, 0.0 GB of host memory in 2 + 1 copies")


def test_a_cache_that_no_gpu_has_room_for_is_told(machine):
    with pytest.warns(PlacementWarning, match="device_cache_size=2147483648 is more than the free memory of cuda:0"):
        made = make_handle(ROWS.clone(), torch.float32, None, None, 1 << 31, [[0], [1]], policy="device_replicate",
                           cold_policy="auto")  # fmt: skip

    assert made.hot[0].count == len(ROWS)
