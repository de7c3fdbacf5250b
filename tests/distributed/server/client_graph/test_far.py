"""Batches of clients whose servers are on other hosts, or might be, are those of one machine."""

import importlib.util
import threading

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.distributed.dist_loader import DistNeighborLoader
from pyg_direct.distributed.server import client_connections, client_connections as switchboard
from pyg_direct.distributed.server.client_connections import Lines, Sent, can_open
from pyg_direct.distributed.server.client_graph import ClientGraph
from pyg_direct.distributed.server.local_channel import Channels
from pyg_direct.distributed.server.part_server import QUESTIONS, PartServer
from tests.distributed.lines import find_here
from tests.distributed.ranks import COMMON, as_dict, assert_alone, assert_equal, write_data

pytestmark = pytest.mark.skipif(not can_open(), reason="needs a torch with Gloo")
SEEDS = torch.arange(0, 300, 3)


class FarServers:
    """Servers in this process, as if on other hosts; a call of one is what Ray would do."""

    def __init__(self, folder, breaks):
        self._servers = [PartServer(folder, part, find_address=find_here) for part in range(2)]
        self.size, self._breaks = 2, breaks
        self._lines = Lines(lambda part: self._servers[part].meet_far(), find_here)
        self.num_over = self.num_broken = 0

    def ask(self, method, questions):
        found = {}
        for part, question in questions.items():
            server = self._servers[part]
            name = self._lines.find(part) if method in QUESTIONS else None
            reply = server.answer(name, method, question) if name is not None else None
            has_answer = False
            if reply is not None:
                self.num_over += reply[1] is not None
                if self._breaks and reply[1] is not None and self.num_over % self._breaks == 0:
                    self.num_broken += 1
                    server._switchboard._drop(name)
                    reply = (reply[0], Sent(reply[1].number + 1, *reply[1][1:]), None)
                has_answer, found[part] = self._lines.hear(part, reply, 300)
            if not has_answer:
                found[part] = getattr(server, method)(*question)
            if method in QUESTIONS:
                self._lines.consider(part, found[part])
        return found


@pytest.mark.parametrize("breaks", [0, 5])
@pytest.mark.parametrize("options", [{}, {"time_attr": "time"}], ids=str)
def test_batches_are_those_of_one_machine(folder, data, options, breaks, monkeypatch):
    for room in (client_connections, switchboard):
        monkeypatch.setattr(room, "LARGE", 64)
    servers = FarServers(folder, breaks)
    before = threading.active_count()

    graph = ClientGraph(servers, device="cpu")
    got = [as_dict(batch) for batch in DistNeighborLoader(graph, [4, 3], SEEDS, prefetch=2, **options, **COMMON)]
    graph.close()

    expected = [as_dict(batch) for batch in NeighborLoader(data, [4, 3], SEEDS, device="cpu", **options, **COMMON)]
    assert len(got) == len(expected)
    for batch, other in zip(got, expected, strict=True):
        assert_equal(batch, other)
    assert servers.num_over > 20
    assert (servers.num_broken > 3) == (breaks > 0)
    assert threading.active_count() <= before


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
@pytest.mark.filterwarnings("ignore")
def test_batches_over_lines_are_those_of_one_machine_while_servers_are_killed(data, tmp_path, monkeypatch):
    import ray

    from pyg_direct.distributed.server import ray_servers as engine

    got, over = [], set()

    class Recorded(Lines):
        def hear(self, part, reply, timeout):
            has_answer, answer = super().hear(part, reply, timeout)
            over.update({(len(got), part)} if has_answer and reply[1] is not None else ())
            return has_answer, answer

    monkeypatch.setattr(engine, "Lines", Recorded)
    data.x = torch.rand(data.num_nodes, 2000)
    write_data(tmp_path / "wide", data, 2)
    servers = engine.serve(tmp_path / "wide", "far", num_cpus=0.5)
    # As if they were on other hosts.
    servers._channels = Channels(lambda *_: False, 300)
    try:
        graph = ClientGraph(servers, device="cpu")
        for batch in DistNeighborLoader(graph, [4, 3], SEEDS, prefetch=0, **COMMON):
            got.append(as_dict(batch))
            if len(got) in (2, 4):
                ray.kill(ray.get_actor(f"far/{len(got) // 2 - 1}", namespace="pyg_direct"), no_restart=False)
    finally:
        servers.close()
        ray.shutdown()

    assert_alone(got, data, [4, 3], SEEDS)
    # All but the first rows of each server, until it is killed and after it is back.
    assert over == {(1, 0), (3, 0), (4, 0), (5, 0), (6, 0), (1, 1), (2, 1), (3, 1), (5, 1), (6, 1)}
