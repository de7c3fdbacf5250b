"""Servers on two hosts of a Ray cluster, with addresses, names and files of their own, and a client on one of them."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.distributed import DistNeighborLoader
from pyg_direct.distributed.server.client_graph import ClientGraph
from pyg_direct.errors import RankError
from tests.distributed.damage import SAID, damage
from tests.distributed.hosts import ADDRESSES, Hosts, can_name_hosts
from tests.distributed.ranks import COMMON, as_dict, assert_equal, make_data, write_data

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
    pytest.mark.skipif(not can_name_hosts(), reason="needs network and time namespaces"),
    pytest.mark.timeout(900),
]
# Seconds that an answer is waited for: more than a test has.
TIMEOUT = 3600
ROOT, PORT = Path(__file__).parents[4], 6379
SEEDS = torch.arange(0, 300, 2)
# Seconds without an answer after which Ray gives a host up: more than a busy machine keeps one silent.
GIVEN_UP = 30
# Programs that are started until Ray gives no host up before its cable is cut for good.
MOST_PROGRAMS = 3
RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5e" * 32, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
       "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000",
       "RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": str(GIVEN_UP),
       "PYTHONPATH": str(ROOT)}  # fmt: skip


class Cluster:
    """Ray on two hosts.

    Args:
        hosts: They.
        folder: For files.
        mounts: (folder, the one in whose place the second host sees it).
    """

    def __init__(self, hosts, folder, mounts=()):
        self._hosts, self._environment = hosts, {**os.environ, **RAY}
        self._mounts = []
        Path("/tmp/ray").mkdir(exist_ok=True)
        for number in range(2):
            own = Path(folder) / f"ray-{number}"
            own.mkdir()
            self._mounts.append([(own, "/tmp/ray"), *(mounts if number else ())])
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=2", "--object-store-memory=80000000",
               "--disable-usage-stats"]  # fmt: skip
        roles = (["--head", f"--port={PORT}", "--include-dashboard=false"], [f"--address={ADDRESSES[0]}:{PORT}"])
        for number, role in enumerate(roles):
            words = [*ray, *role, f"--node-ip-address={ADDRESSES[number]}"]
            done = subprocess.run(self._on(number, *words), env=self._environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr

    def _on(self, number, *words):
        return self._hosts.on(number, *words, mounts=self._mounts[number])

    def start(self, name, *args):
        """A function of this file in a program on the first host."""
        code = f"import sys; from {__name__} import {name}; {name}(*sys.argv[1:])"
        return subprocess.Popen(self._on(0, sys.executable, "-c", code, *args), env=self._environment,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)  # fmt: skip


def is_view(array):
    """Whether the numbers lie where they came to, and were not made from a pickle's bytes."""
    owner = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return not array.flags.owndata and not isinstance(owner, bytes | bytearray | None)


def load(folder, signals):
    """Batches of two epochs, with the network cut within each, once for a while and once for good."""
    import ray

    from pyg_direct.distributed.server import ray_servers as engine

    signals, came, epochs, cuts, parent = Path(signals), [], [], ("healed", "gone"), os.getppid()
    # Nothing is on its way when the cable is pulled.
    turn = threading.Lock()

    class Recorded(engine.RayServers):
        def ask(self, method, questions):
            # Either may be the first question that is asked after the cable is pulled.
            if method not in ("pick", "read"):
                return super().ask(method, questions)
            with turn:
                return self._ask(method, questions)

        def _ask(self, method, questions):
            cut, healing = cuts[len(epochs) - 1], signals / "healing"
            is_far = any(self._channels._channels.get(part, part) is None for part in questions)
            is_cut, is_early = is_far and (signals / f"{cut}-cut").exists(), not healing.exists()
            if is_cut:
                (signals / f"{cut}-asked").touch()
            found = super().ask(method, questions)
            if is_cut:
                felt.append((len(epochs), is_early, healing.exists()))
            if method == "pick":
                return found
            near.extend((len(epochs), part) for part in questions if self._channels._channels[part] is not None)
            came.extend((part, found[part].nbytes, is_view(found[part])) for part in questions
                        if self._channels._channels[part] is None)  # fmt: skip
            return found

    engine.RayServers, near, felt = Recorded, [], []
    servers = engine.serve(folder, "apart", num_cpus=0.5, address=f"{ADDRESSES[0]}:{PORT}", timeout=TIMEOUT)
    graph = ClientGraph(servers, device="cpu")
    for cut in cuts:
        epochs.append([])
        for number, batch in enumerate(DistNeighborLoader(graph, [4, 3], SEEDS, **COMMON)):
            epochs[-1].append(as_dict(batch))
            if number == 1:
                with turn:
                    if not all(node["Alive"] for node in ray.nodes()):
                        (signals / "too-soon").touch()
                        return
                    (signals / f"{cut}-now").touch()
                    wait_for(signals / f"{cut}-cut", lambda: os.getppid() == parent)
    torch.save((epochs, came, near, felt), signals / "found")
    servers.close()


def wait_for(path, is_alive):
    """Until a file is there, for as long as whoever writes it lives."""
    while not path.exists():
        assert is_alive() or path.exists(), f"{path.name} does not come"
        time.sleep(0.02)


def make_wide_data():
    """Rows of a batch are more than Ray sends with its messages."""
    data = make_data()
    data.x = torch.rand(data.num_nodes, 3000, generator=torch.Generator().manual_seed(0))
    return data


def cut_twice(folder, partitions):
    """Load batches in a program on one host and cut the network below it, once for a while and once for good.

    Returns:
        Exit status of the program, and its output. The file `too-soon` is there if Ray gave a host up before the cable
        was cut for good.
    """
    with Hosts() as hosts, contextlib.ExitStack() as stack:
        program = Cluster(hosts, folder).start("load", partitions, folder)
        stack.callback(program.stdout.close)

        def is_alive():
            if program.poll() is not None:
                assert (folder / "too-soon").exists(), program.stdout.read()
                raise ProcessLookupError
            return True

        with contextlib.suppress(ProcessLookupError):
            for cut in ("healed", "gone"):
                wait_for(folder / f"{cut}-now", is_alive)
                hosts.cut()
                (folder / f"{cut}-cut").touch()
                # What is asked of the other host from here on waits for the cable, or for a server on this host.
                wait_for(folder / f"{cut}-asked", is_alive)
                if cut == "healed":
                    time.sleep(2)
                    (folder / "healing").touch()
                    hosts.heal()
        said, _ = program.communicate()
    return program.returncode, said


def test_batches_are_those_of_one_machine_while_the_network_between_hosts_is_cut(tmp_path):
    data = make_wide_data()
    write_data(tmp_path / "p", data, 2)

    for number in range(MOST_PROGRAMS):
        folder = tmp_path / f"program-{number}"
        folder.mkdir()
        status, said = cut_twice(folder, tmp_path / "p")
        assert status == 0, said
        if not (folder / "too-soon").exists():
            break
    epochs, came, near, felt = torch.load(folder / "found", weights_only=False)

    expected = [as_dict(batch) for batch in NeighborLoader(data, [4, 3], SEEDS, device="cpu", **COMMON)]
    for got in epochs:
        for batch, other in zip(got, expected, strict=True):
            assert_equal(batch, other)
    # One part is served on each host, so that rows of one alone came over the network, as they are.
    assert len({part for part, *_ in came}) == 1
    assert min(size for _, size, _ in came) > 200_000
    assert all(is_view for *_, is_view in came)
    # The server that came back on the host of the client is asked as the one that was there, over memory.
    assert {part for epoch, part in near if epoch == 1} < {part for epoch, part in near if epoch == 2} == {0, 1}
    # What was asked over the cut cable was answered once it was back and not before; in the second epoch, where it is
    # not, since a server is here.
    assert (1, True, True) in felt
    assert (1, True, False) not in felt
    assert any(epoch == 2 for epoch, *_ in felt)


def hear(*folders):
    """What is said of each of some partitions that are to be served."""
    from pyg_direct.distributed.server.ray_servers import serve

    for number, folder in enumerate(folders):
        try:
            serve(folder, f"p{number}", num_cpus=0.5, address=f"{ADDRESSES[0]}:{PORT}", timeout=TIMEOUT).close()
            print("heard: nothing")
        except RankError as error:
            print("heard:", error)


def test_files_that_are_missing_or_of_another_version_on_one_host_are_named_with_it(tmp_path):
    kinds, mounts = ["missing", "version"], []
    for kind in kinds:
        for place in (tmp_path / kind, tmp_path / "other" / kind):
            write_data(place, make_data(), 2)
        mounts.append((tmp_path / "other" / kind, tmp_path / kind))
    for kind in kinds:
        # Whichever part the host serves.
        for part in range(2 if kind == "missing" else 1):
            damage(tmp_path / "other" / kind, kind, part)

    with Hosts() as hosts:
        program = Cluster(hosts, tmp_path, mounts).start("hear", *(tmp_path / kind for kind in kinds))
        said, _ = program.communicate()

    heard = [line.removeprefix("heard: ") for line in said.splitlines() if line.startswith("heard: ")]
    assert len(heard) == 2, said
    for text, kind in zip(heard, kinds, strict=True):
        assert text.startswith("the server of part ")
        assert f" failed: PartitionError: {tmp_path / kind}/" in text
        assert SAID[kind] in text
        assert text.endswith(f" (on {hosts.names[1]})")
