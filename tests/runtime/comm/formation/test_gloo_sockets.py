"""Addresses that processes of one host listen on."""

import os
import socket
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.distributed.exchange import run_processes
from pyg_direct.runtime.comm import formation
from pyg_direct.runtime.comm.communicator import Communicator
from tests.processes import begin_until_joined, join_group, start_method

NAMES = (formation.GLOO, formation.NCCL)


def list_listened():
    """(process, address, port) of all sockets that this process and those it started listen on."""
    # As it is called before psutil 6.
    list_connections = getattr(psutil.Process, "net_connections", None) or psutil.Process.connections
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {(process.pid, part.laddr.ip, part.laddr.port) for process in processes
            for part in list_connections(process, "inet") if part.status == psutil.CONN_LISTEN}  # fmt: skip


def find_addresses():
    """The IPv4 addresses of each interface that has some and is up."""
    found = {name: {part.address for part in parts if part.family == socket.AF_INET}
             for name, parts in psutil.net_if_addrs().items()}  # fmt: skip
    is_up = {name for name, known in psutil.net_if_stats().items() if known.isup}
    return {name: addresses for name, addresses in found.items() if addresses and name in is_up}


def open_group(rank, folder, told, is_apart):
    """Return Gloo's interface while a communicator is made, the addresses it listens on, and the interface
    afterwards.
    """
    os.environ.pop(formation.GLOO, None)
    if told is not None:
        os.environ[formation.GLOO] = told
    torch.set_num_threads(1)
    join_group(rank, 2, f"file://{folder}/group")
    if is_apart:
        formation._identify_network = lambda: f"network {rank}"
    make, seen = dist.ProcessGroupGloo, []
    dist.ProcessGroupGloo = lambda *args: seen.append(os.environ.get(formation.GLOO)) or make(*args)
    before = list_listened()
    with_others = Communicator(device=torch.device("cpu"))
    new = {address for _, address, _ in list_listened() - before}
    agreed = with_others.run(with_others.agree, rank)
    with_others.close()
    torch.save((seen, new, os.environ.get(formation.GLOO), agreed), folder / str(rank))
    dist.destroy_process_group()


@pytest.mark.parametrize("is_apart", [False, True], ids=["one network", "two networks"])
@pytest.mark.parametrize("is_told", [False, True], ids=["by default", "where told"])
def test_gloo_listens_on_the_loopback_of_one_host(tmp_path, is_told, is_apart):
    addresses, name = find_addresses(), formation.find_loopback()
    # Another one, if there is one.
    told = next((other for other in addresses if other != name), name) if is_told else None

    def start():
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        mp.start_processes(open_group, (folder, told, is_apart), 2, start_method=start_method())
        return folder

    folder = begin_until_joined(start)

    for rank in range(2):
        seen, listened, after, agreed = torch.load(folder / str(rank), weights_only=False)
        assert seen == [told if is_told else None if is_apart else name]
        assert after == told
        assert agreed == [0, 1]
        if is_told or not is_apart:
            assert listened
            assert listened <= addresses[told or name]


def listen(rank, count, device):
    assert (rank, count, device) == (rank, 2, torch.device("cpu", 0))
    return {"addresses": sorted({address for _, address, _ in list_listened()}),
            "told": [os.environ.get(name) for name in NAMES]}  # fmt: skip


@pytest.mark.usefixtures("quick_starts")
def test_processes_of_a_benchmark_listen_on_the_loopback(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    found = run_processes(listen, 2, "cpu", threads=1)

    assert found == {"addresses": ["127.0.0.1"], "told": [formation.find_loopback()] * 2}


def test_what_a_user_says_stays(monkeypatch):
    environment = {formation.GLOO: "eth7"}
    monkeypatch.setattr(formation.os, "environ", environment)
    monkeypatch.setattr(formation, "find_loopback", lambda: "lo7")

    formation.stay_on_host()

    assert environment == {formation.GLOO: "eth7", formation.NCCL: "lo7"}
