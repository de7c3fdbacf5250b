"""Ctrl-C at a training run of several processes leaves no process, no file and no shared memory."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.distributed.ranks import make_data, write_data

# Rank 0 also has batches made by a separate process. A background process is not interrupted by default.
PROGRAM = """
import os, signal, sys
import uuid
import torch.multiprocessing as mp
from pyg_direct import NeighborLoader, Producers
from pyg_direct.distributed import DistGraph, DistNeighborLoader
from tests.batches import make_data
from tests.processes import begin_until_joined, join_group, start_method

def train(rank, folder, group):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    join_group(rank, 2, f"file://{folder}/{group}")
    producers = Producers(NeighborLoader(make_data(), [3, 2], batch_size=16, device="cpu"), device="cpu")
    graph = DistGraph(f"{folder}/parts", device="cpu", share_graph=False)
    while True:
        for number, batch in enumerate(DistNeighborLoader(graph, [3, 2], batch_size=16, prefetch=2, seed=1)):
            if rank == 0 and number == 0:
                assert len(list(producers)) == len(producers)
            if number == 3:
                open(f"{folder}/{rank}", "w").write(str(os.getpid()))

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begin_until_joined(lambda: mp.start_processes(train, args=(sys.argv[1], uuid.uuid4().hex), nprocs=2,
                                                  start_method=start_method()))
"""


def is_there(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(is_so):
    """For as long as the test may take."""
    while not is_so():
        time.sleep(0.05)


@pytest.fixture
def temporary():
    """A folder with a short name, as the names of sockets in it may have 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
def test_nothing_stays(tmp_path, temporary):
    write_data(tmp_path / "parts", make_data(), 2)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(temporary),
                   "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # fmt: skip
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, tmp_path / "program.py", tmp_path], env=environment,
                                   start_new_session=True, stdout=said, stderr=said)  # fmt: skip
    try:
        ranks = [tmp_path / str(rank) for rank in range(2)]
        wait_until(lambda: process.poll() is not None or all(map(Path.exists, ranks)))
        assert process.poll() is None, (tmp_path / "said").read_text()

        # As a terminal does: to all of them.
        os.killpg(process.pid, signal.SIGINT)

        process.wait()
        wait_until(lambda: not is_there(process.pid))
        assert process.returncode != 0
        assert "KeyboardInterrupt" in (tmp_path / "said").read_text()
        # Torch keeps its compiled code.
        stays = [path.name for path in temporary.iterdir()]
        assert [name for name in stays if not name.startswith("torchinductor")] == []
        assert not [name for name in os.listdir("/dev/shm") for rank in ranks if f"_{rank.read_text()}_" in name]
    finally:
        if is_there(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
