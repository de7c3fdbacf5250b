"""How hot rows are shared out over the GPUs of a clique, and which GPUs make one."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError
from pyg_direct.features.process_sharing import PARTS, deal_chunks, fit_rows, weigh_chunks
from pyg_direct.runtime.cuda.peer_memory import (
    GRANULE,
    DeviceGroup,
    check_devices,
    find_cliques,
    init_p2p,
    p2pCliqueTopo,
)


def linked(*pairs):
    both = {pair for a, b in pairs for pair in ((a, b), (b, a))}
    return lambda a, b: (a, b) in both


@pytest.mark.parametrize(("devices", "is_linked", "cliques"), [
    ([0], linked(), [[0]]),
    ([0, 1], linked(), [[0], [1]]),
    ([0, 1], linked((0, 1)), [[0, 1]]),
    # Two boards of four.
    (list(range(8)), lambda a, b: a // 4 == b // 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    # All to all, as through a switch: Quiver cuts eight GPUs in two whatever joins them.
    (list(range(8)), lambda a, b: True, [list(range(8))]),
    # Cliques of three sizes; three of them.
    ([0, 1, 2, 3, 4, 5], linked((0, 1), (0, 2), (1, 2), (3, 4)), [[0, 1, 2], [3, 4], [5]]),
    # A ring has only pairs.
    ([0, 1, 2, 3], linked((0, 1), (1, 2), (2, 3), (3, 0)), [[0, 1], [2, 3]]),
    ([3, 1, 0], linked((0, 3)), [[3, 0], [1]]),
    # The largest group comes first, even without the first GPU.
    ([0, 1, 2, 3], linked((0, 1), (1, 2), (1, 3), (2, 3)), [[0], [1, 2, 3]]),
    # A link in one direction does not count.
    ([0, 1], lambda a, b: a < b, [[0], [1]]),
])  # fmt: skip
def test_cliques_of_any_shape(devices, is_linked, cliques):
    assert find_cliques(devices, is_linked) == cliques


@given(st.integers(1, 8), st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7))))
def test_every_gpu_is_in_one_clique_of_linked_ones(count, pairs):
    def is_linked(a, b):
        return (a, b) in pairs

    cliques = find_cliques(range(count), is_linked)

    assert sorted(device for clique in cliques for device in clique) == list(range(count))
    assert all(is_linked(a, b) for clique in cliques for a in clique for b in clique if a != b)


@pytest.mark.parametrize(("devices", "error"), [
    ([], ArgumentTypeError), ([0, True], ArgumentTypeError), ([-1], ArgumentTypeError), (["0"], ArgumentTypeError),
    ([1, 1], ArgumentError),
])  # fmt: skip
def test_bad_lists_of_gpus_are_named(devices, error):
    with pytest.raises(error, match="device_list must hold"):
        check_devices(devices)


def test_a_group_by_hand_is_a_list_of_gpus():
    group = DeviceGroup(1, [2, 3])

    assert (group.group_id, group.device_list, group.size) == (1, [2, 3], 2)


@pytest.mark.parametrize("ask", [p2pCliqueTopo, init_p2p])
def test_gpus_that_are_not_there_are_named(ask):
    with pytest.raises(DeviceError, match=r"99|is_available"):
        ask([0, 99])


@pytest.mark.parametrize("num_rows", [0, 1, 1000, 1 << 20])
@pytest.mark.parametrize("budget", [GRANULE, 10 * GRANULE, 64 << 20, 1 << 30])
@pytest.mark.parametrize("num_gpus", [1, 2, 3, 8])
def test_no_gpu_holds_more_than_its_budget(num_rows, budget, num_gpus):
    count, chunk_bytes = fit_rows(num_rows, 400, budget, num_gpus)
    weights = weigh_chunks(None, count, 400, chunk_bytes)
    owners = deal_chunks(weights, list(range(num_gpus))) if count else []

    held = [owners.count(gpu) * chunk_bytes for gpu in range(num_gpus)]
    assert max(held, default=0) <= budget
    assert sum(held) >= count * 400
    # Little of the budget remains unused if there are rows for it.
    assert count == num_rows or count * 400 >= 0.7 * budget * num_gpus
    assert len(owners) <= 2 * PARTS * num_gpus


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=64), st.integers(1, 8))
def test_chunks_are_dealt_evenly_in_number(weights, num_gpus):
    owners = deal_chunks(torch.tensor(weights, dtype=torch.float64), list(range(num_gpus)))

    counts = [owners.count(gpu) for gpu in range(num_gpus)]
    assert len(owners) == len(weights)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("num_gpus", [2, 3, 4])
def test_gpus_are_read_from_about_equally_often(num_gpus):
    # A few hubs are listed far more than all others, and stand first.
    heat = 1e6 / torch.arange(1, 100_001).double()

    weights = weigh_chunks(heat, 100_000, 512, GRANULE)
    owners = deal_chunks(weights, list(range(num_gpus)))

    load = torch.zeros(num_gpus, dtype=torch.float64).index_add_(0, torch.tensor(owners), weights)
    # The heaviest chunk alone has more than a share; the others make up for it as far as they can.
    assert load.max() <= max(1.2 * load.mean(), weights.max() * 1.2)


def test_a_row_counts_for_the_chunk_it_begins_in():
    weights = weigh_chunks(torch.tensor([1, 2, 4, 8]), 4, 3 * GRANULE // 4, GRANULE)

    assert weights.tolist() == [3.0, 4.0, 8.0]
