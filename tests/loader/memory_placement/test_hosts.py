"""Processes of a host keep neighbor lists once, and choose together where GPUs, which are not there, read them."""

import logging
import os
import pickle
import weakref
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch

from pyg_direct import CSRTopo, NeighborLoader
from pyg_direct.errors import CudaError
from pyg_direct.features import process_sharing
from pyg_direct.graph import csr_topo as topology_module, placed_topology
from pyg_direct.loader import memory_placement as hosts
from pyg_direct.loader.memory_placement import Kept, keep_once, settle_places
from pyg_direct.runtime.cuda.memory import Block
from pyg_direct.runtime.host import host_memory as host
from pyg_direct.runtime.host.shared_memory import find_shared, share
from pyg_direct.sampler.graph_reader import read_topology
from tests.batches import hash_batches, make_data
from tests.processes import run_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
EDGES = torch.arange(1000).remainder(40).view(2, 500)
TWO = [(0, "unified"), (1, "unified")]


def make_topology():
    return CSRTopo(EDGES, num_nodes=40)


@pytest.fixture
def room(monkeypatch):
    """A host with 100 bytes free, whose GPUs read unified memory where it lies."""
    found = SimpleNamespace(free=100, is_unified=True)
    monkeypatch.setattr(process_sharing, "available_bytes", lambda: found.free)
    monkeypatch.setattr(
        process_sharing, "abilities", lambda index: SimpleNamespace(managed_without_migration=found.is_unified)
    )
    return found


@pytest.mark.parametrize(("said", "num_bytes", "policy", "expected"), [
    # Two copies in four fifths of what is free, which those in GPU memory do not need.
    (TWO, 40, "auto", TWO), (TWO, 41, "auto", [(0, "pinned"), (1, "pinned")]),
    ([(0, "unified"), (1, "cuda")], 41, "auto", [(0, "unified"), (1, "cuda")]),
    ([(0, "unified"), (1, "cuda")], 81, "auto", [(0, "pinned"), (1, "cuda")]),
    # Where there is room, what was measured stays.
    ([(0, "pinned"), (1, "unified")], 1, "auto", [(0, "pinned"), (1, "unified")]),
    (TWO, 41, "shard", [(0, "pinned"), (1, "pinned")]), (TWO, 99, "unified", TWO),
    (TWO, 1, "pinned", [(0, "pinned"), (1, "pinned")]), ([(None, "cpu")] * 2, 99, "pinned", [(None, "cpu")] * 2),
    ([(0, "cuda")], 99, "pinned", [(0, "cuda")]),
])  # fmt: skip
def test_each_gpu_has_a_copy_where_the_host_has_room(room, said, num_bytes, policy, expected):
    assert settle_places(said, num_bytes, policy) == expected


def test_lists_are_page_locked_where_gpus_would_move_unified_memory(room):
    room.is_unified = False

    assert settle_places(TWO, 1, "auto") == [(0, "pinned"), (1, "pinned")]


@pytest.mark.parametrize(("free", "place", "kept"), [
    (1 << 30, "unified", "0.000 GB in 2 + 1 copies"), (100, "pinned", "0.000 GB in 0 + 1 copies"),
])  # fmt: skip
def test_what_was_chosen_and_what_it_takes_is_told(room, monkeypatch, caplog, free, place, kept):
    room.free, topology = free, make_topology()
    monkeypatch.setattr(hosts, "has_group", lambda: True)
    monkeypatch.setattr(CSRTopo, "choose_placement", lambda *_: "unified")
    monkeypatch.setattr(hosts, "give_to_host", lambda make, about: make([[0, "unified"], list(about)]))

    with caplog.at_level(logging.INFO, "pyg_direct"):
        places = [keep_once(topology, "auto", GPU, "auto") for _ in range(2)]

    assert places == [place] * 2
    # Once, and asked once.
    (line,) = caplog.messages
    assert line.startswith(f"500 edges in {place} memory, shared: 2 processes of this host keep {kept}; in 0.")


@pytest.mark.parametrize(("is_equal", "is_placed"), [(True, False), (False, False), (True, True)])
def test_arrays_of_the_first_process_are_taken_if_they_are_equal(monkeypatch, is_equal, is_placed):
    first, own = make_topology(), CSRTopo(EDGES if is_equal else EDGES.flip(0) + 1, num_nodes=41 - is_equal)
    expected, memory = own.indices.tolist(), weakref.ref(own.indices)
    if is_placed:
        own.place("cpu", CPU)
    monkeypatch.setattr(hosts, "has_group", lambda: True)
    monkeypatch.setattr(hosts, "give_to_host", lambda make, about: Kept(first, [about] * 2))

    assert keep_once(own, "auto", CPU, "auto") == "cpu"

    is_taken = is_equal and not is_placed
    assert (own.indices is first.indices) == is_taken
    assert (memory() is None) == is_taken
    assert own.indices.tolist() == expected


@pytest.mark.parametrize("can_lock", [True, False])
def test_shared_lists_are_page_locked_where_they_lie(monkeypatch, can_lock):
    locked, moved = [], []

    def pin(memory, device):
        if not can_lock:
            raise CudaError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY", "too much is locked")
        locked.append(memory)
        block = Block("pinned", memory.num_bytes, device)
        monkeypatch.setattr(block, "view_on_gpu", lambda dtype, shape, device: memory.view(dtype, shape))
        return block

    def move(source, placement, device, what):
        moved.append(what)
        return Block("cpu", 0, None)

    monkeypatch.setattr(placed_topology, "pin", pin)
    monkeypatch.setattr(placed_topology, "move", move)
    monkeypatch.setattr(Block, "view_on_cpu", lambda self, dtype, shape: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(placed_topology, "check_filled", lambda *_: None)
    array, alone = torch.arange(50), torch.arange(50)
    memory = share(array)

    view, on_host, block = placed_topology.place_array(array, "pinned", GPU, "neighbors")
    placed_topology.place_array(alone, "pinned", GPU, "others")

    assert moved == (["others"] if can_lock else ["neighbors", "others"])
    assert locked == ([memory] if can_lock else [])
    assert block.placement == ("pinned" if can_lock else "cpu")
    assert not can_lock or view.data_ptr() == on_host.data_ptr() == array.data_ptr()


def send(topology):
    return pickle.loads(ForkingPickler.dumps(topology))


@pytest.mark.parametrize(("free", "expected"), [(10_820, "unified"), (10_819, "pinned")])
def test_processes_that_a_topology_is_sent_to_choose_alike(monkeypatch, free, expected):
    topology = make_topology()
    found = SimpleNamespace(free=free)
    # Two copies in four fifths of what is free.
    assert topology.num_bytes == 4328
    monkeypatch.setattr(host, "available_bytes", lambda: found.free)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(topology_module, "choose_placement", lambda *_: "unified")
    monkeypatch.setattr(topology_module, "resolve_device", lambda device: GPU)

    sent = [send(topology)]
    # The first one has taken its copy.
    found.free = 0
    sent.append(send(topology))

    assert [each.choose_placement() for each in sent] == [expected] * 2
    # What is kept in a file knows nothing of it.
    assert pickle.loads(pickle.dumps(sent[0])).choose_placement() == "unified"
    assert topology.choose_placement() == "unified"


def read_shared(rank, cache_policy):
    data = make_data()
    options = {"batch_size": 16, "seed": 1, "device": "cpu"}
    loader = NeighborLoader(data, [3, 2], ranks="auto", uneven="keep", cache_policy=cache_policy, **options)
    batches = [hash_batches([batch]) for batch in loader]
    memory = find_shared(read_topology(data, loader.device).indices)
    if rank == 0:
        # A loader of one process alone waits for nobody.
        list(NeighborLoader(data, [2], cache_policy=cache_policy, **options))
    return batches, None if memory is None else os.fstat(memory.descriptor).st_ino


@pytest.mark.slow
@pytest.mark.parametrize("cache_policy", ["device_replicate", None])
def test_processes_of_a_group_have_neighbor_lists_once(cache_policy):
    loader = NeighborLoader(make_data(), [3, 2], batch_size=16, seed=1, device="cpu")
    expected = [hash_batches([batch]) for batch in loader]

    (first, one), (second, other) = run_ranks(read_shared, 2, cache_policy)

    assert [(first, second)[number % 2][number // 2] for number in range(len(expected))] == expected
    assert one == other
    assert (one is not None) == (cache_policy is not None)
