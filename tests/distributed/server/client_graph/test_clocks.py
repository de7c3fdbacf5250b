"""Servers and a client whose clocks are hours apart and go back: batches are those of one machine, time-outs hold."""

import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.distributed.dist_loader import DistNeighborLoader
from pyg_direct.distributed.server.client_graph import ClientGraph
from pyg_direct.distributed.server.local_channel import Channels
from pyg_direct.errors import RankError
from tests.distributed.ranks import COMMON, as_dict, assert_equal, write_data

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]
HOUR = 3600
# What a process starts with that finds it: the time of day is so many seconds ahead as a file says.
AHEAD = """
import time
from pathlib import Path

file, now, now_ns = Path(__file__).with_name("ahead"), time.time, time.time_ns
time.time = lambda: now() + int(file.read_text())
time.time_ns = lambda: now_ns() + int(file.read_text()) * 10**9
"""
# Seconds that an answer is waited for of a server that says nothing; all other answers have as long as the test.
PATIENCE, TIMEOUT = 3, 3600


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """Sets how many seconds the clocks of all servers are ahead of the one of the machine."""
    import ray

    from pyg_direct.distributed.server import ray_servers as engine

    folder = tmp_path_factory.mktemp("clock")
    (folder / "sitecustomize.py").write_text(AHEAD)

    def set_clock(seconds):
        (folder / "new").write_text(str(seconds))
        (folder / "new").replace(folder / "ahead")

    set_clock(6 * HOUR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', Path(__file__).parents[4])}")
        engine._start(None)
        yield set_clock
        ray.shutdown()


def find_server(name, part):
    import ray

    return ray.get_actor(f"{name}/{part}", namespace="pyg_direct")


def look(name, part):
    """(number of a server's process, its time of day)."""
    import ray

    return ray.get(find_server(name, part).__ray_call__.remote(lambda _: (os.getpid(), time.time())))


@pytest.mark.parametrize("way", ["memory", "ray"])
def test_clocks_that_are_apart_and_go_back_change_nothing(clock, data, tmp_path, monkeypatch, way):
    import ray

    from pyg_direct.distributed.server import ray_servers as engine

    data.x = torch.rand(data.num_nodes, 2000)
    write_data(tmp_path / "wide", data, 2)
    clock(6 * HOUR)
    name, now, behind, over, got, patience = way, time.time, [3 * HOUR], [], [], [TIMEOUT]
    monkeypatch.setattr(time, "time", lambda: now() - behind[0])

    class RecordedChannels(Channels):
        def hear(self, part):
            over.append("memory")
            # Whichever thread asks.
            self._timeout = patience[0]
            return super().hear(part)

    def make_channels(servers):
        return RecordedChannels(servers._meet if way == "memory" else lambda *_: False, servers._timeout)

    servers = engine.serve(tmp_path / "wide", name, num_cpus=0.5, timeout=TIMEOUT)
    servers._channels = make_channels(servers)
    apart = [look(name, part)[1] - time.time() for part in range(2)]
    graph = ClientGraph(servers, device="cpu")
    for batch in DistNeighborLoader(graph, [4, 3], prefetch=1, **COMMON):
        got.append(as_dict(batch))
        if len(got) == 2:
            clock(-6 * HOUR)
        if len(got) == 3:
            # The one that comes back has never seen the clock ahead.
            ray.kill(find_server(name, 0), no_restart=False)
        if len(got) == 4:
            behind[0] = 24 * HOUR
    later = [look(name, part)[1] - time.time() for part in range(2)]
    # A server that says nothing is given up in time, though the clocks of both go back while it is waited for.
    hasty = engine.connect(2, name, timeout=TIMEOUT)
    hasty._channels = make_channels(hasty)
    batches = iter(DistNeighborLoader(ClientGraph(hasty, device="cpu"), [4, 3], prefetch=0, **COMMON))
    next(batches)
    stopped, _ = look(name, 1)
    os.kill(stopped, signal.SIGSTOP)
    hasty._timeout = patience[0] = PATIENCE
    behind[0], begin = 72 * HOUR, time.monotonic()
    clock(-12 * HOUR)
    with pytest.raises(RankError, match="the server of part 1 did not answer"):
        next(batches)
    seconds = time.monotonic() - begin
    os.kill(stopped, signal.SIGCONT)
    servers.close()

    assert [round(difference / HOUR) for difference in apart] == [9, 9]
    assert [round(difference / HOUR) for difference in later] == [18, 18]
    expected = [as_dict(batch) for batch in NeighborLoader(data, [4, 3], device="cpu", **COMMON)]
    for batch, other in zip(got, expected, strict=True):
        assert_equal(batch, other)
    # The test has no time for the hours by which clocks went back.
    assert seconds >= PATIENCE
    assert bool(over) == (way == "memory")
