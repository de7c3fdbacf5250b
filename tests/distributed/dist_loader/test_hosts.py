"""Two hosts, with addresses and clocks of their own: a network that comes back, and one that does not."""

import time

import pytest
import torch
import torch.multiprocessing as mp

from pyg_direct import NeighborLoader
from pyg_direct.distributed.dist_loader import DistNeighborLoader
from pyg_direct.errors import RankError
from tests.distributed.hosts import ADDRESSES, Hosts, can_make_hosts, enter_host
from tests.distributed.ranks import COMMON, as_dict, assert_in_turn, make_data, open_graph, write_data
from tests.processes import begin_until_joined, free_port, join_group, kill_ranks, start_method, wait_for

SEEDS = torch.arange(0, 300, 2)
DAY = 86_400


def load(rank, names, port, folder, signals):
    """Batches while the cable is pulled for a while, and what is heard when it is pulled for good."""
    torch.set_num_threads(1)
    enter_host(names[rank], ahead=DAY * rank)
    join_group(rank, 2, f"tcp://{ADDRESSES[0]}:{port}")
    found = []
    with open_graph(folder) as graph:
        for number, batch in enumerate(DistNeighborLoader(graph, [4, 3], SEEDS, **COMMON)):
            found.append(as_dict(batch))
            (signals / f"{rank}-{number}").touch()
            if number == 1:
                # The epoch is not over before the cable is pulled, however long that takes.
                wait_for(signals / "pulled")
                (signals / f"{rank}-on").touch()
    was_cut = (signals / "healed").exists()
    # Who is gone is heard of long before a time limit, which no test waits out.
    graph = open_graph(folder, silence=5, timeout=3600)
    try:
        for _ in DistNeighborLoader(graph, [4, 3], **COMMON):
            (signals / f"{rank}-again").touch()
            wait_for(signals / "gone")
        heard = "nothing"
    except RankError as error:
        heard = str(error)
    torch.save((found, was_cut, heard), signals / f"{rank}-found")


def wait_for_silence(folder, context, seconds=1.0):
    """Until no process has got a batch for so long."""
    count, since = 0, time.monotonic()
    while time.monotonic() - since < seconds:
        assert not context.join(timeout=0.02)
        if len(list(folder.iterdir())) != count:
            count, since = len(list(folder.iterdir())), time.monotonic()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_make_hosts(), reason="needs network and time namespaces")
def test_a_network_that_is_cut(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    with Hosts() as hosts:

        def start():
            context = mp.start_processes(load, args=(hosts.names, free_port(), tmp_path / "p", tmp_path), nprocs=2,
                                         join=False, start_method=start_method())  # fmt: skip
            try:
                wait_for(tmp_path / "0-1", context)
            except BaseException:
                kill_ranks(context)
                raise
            return context

        context = begin_until_joined(start)
        hosts.cut()
        (tmp_path / "pulled").touch()
        for rank in range(2):
            wait_for(tmp_path / f"{rank}-on", context)
        wait_for_silence(tmp_path, context)
        (tmp_path / "healed").touch()
        hosts.heal()
        for rank in range(2):
            wait_for(tmp_path / f"{rank}-again", context)
        hosts.cut()
        (tmp_path / "gone").touch()
        while not context.join():
            pass
    found, were_cut, heard = zip(*(torch.load(tmp_path / f"{r}-found", weights_only=False) for r in range(2)),
                                 strict=True)  # fmt: skip

    assert_in_turn(found, NeighborLoader(data, [4, 3], SEEDS, device="cpu", **COMMON))
    # The epoch had to wait for the cable, and nothing came of it.
    assert all(were_cut)
    assert heard[0] == "rank 1 is gone: no sign of life for 5 seconds"
    # The group's store is on the other host.
    assert heard[1] == "rank 0, or what keeps the group together, is gone: no sign of life for 5 seconds"
