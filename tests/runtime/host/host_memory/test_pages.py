"""Pages of host memory go to the NUMA nodes that serve them, if there are several."""

import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pyg_direct.errors import CudaError
from pyg_direct.runtime.cuda import memory
from pyg_direct.runtime.host import host_memory

GIB = 1 << 30


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Files of the kernel of a host with nodes 0, 1 and 3, of which this process may use 0 and 1; GPU 0 hangs on 1."""
    (tmp_path / "has_memory").write_text("0-1,3\n")
    (tmp_path / "status").write_text("Name: any\nMems_allowed_list:\t0-2\n")
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        lines = {"MemTotal": 64, "MemFree": 4, "Active(file)": 1, "Inactive(file)": 2, "Dirty": 9}
        text = "".join(f"Node {node} {kind}: {size << 20} kB\n" for kind, size in lines.items())
        (tmp_path / f"node{node}" / "meminfo").write_text(text)
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text("1\n")
    monkeypatch.setattr(host_memory, "_NODES", tmp_path)
    monkeypatch.setattr(host_memory, "_DEVICES", tmp_path)
    monkeypatch.setattr(host_memory, "_STATUS", tmp_path / "status")
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(host_memory, "_is_free_to_choose", lambda: True)
    return tmp_path


def test_memory_goes_to_the_node_of_its_gpu_where_it_fits(host):
    assert host_memory.list_nodes() == (0, 1)
    assert host_memory.choose_nodes(7 * GIB, 0) == (1,)
    assert host_memory.choose_nodes(7 * GIB + 1, 0) == (0, 1)
    assert host_memory.choose_nodes(1, None) == (0, 1)


@pytest.mark.parametrize("node", ["-1", "3", "none"])
def test_a_gpu_of_no_node_that_may_be_used_reads_from_all(host, node):
    (host / "0000:1b:00.0" / "numa_node").write_text(node)

    assert host_memory.choose_nodes(1, 0) == (0, 1)


@pytest.mark.parametrize(("name", "text"), [("has_memory", "0\n"), ("has_memory", ""), ("has_memory", "nothing"),
                                            ("status", "Mems_allowed_list: 1\n")])  # fmt: skip
def test_where_there_is_one_node_nothing_is_chosen(host, name, text):
    (host / name).write_text(text)

    assert host_memory.choose_nodes(1, 0) == ()


def test_a_policy_of_the_process_stands(host, monkeypatch):
    monkeypatch.setattr(host_memory, "_is_free_to_choose", lambda: False)

    assert host_memory.choose_nodes(1, 0) == ()


def test_a_thread_with_a_policy_is_not_free_to_choose():
    # Some containers forbid to look.
    with host_memory.allocating_on(host_memory.list_nodes()):
        assert host_memory._is_free_to_choose() == (policy_of() == (0, []))
    assert host_memory._is_free_to_choose() == (policy_of() == (0, []))


def policy_of(address=None):
    """(policy, nodes) of the page at an address, or of this thread."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    number = host_memory._CALLS[host_memory.platform.machine()][2]
    where = (ctypes.c_void_p(address), 2) if address else (None, 0)
    if host_memory._libc().syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), *where):
        return None
    return mode.value, [node for node in range(1024) if mask[node // 64] >> node % 64 & 1]


@pytest.mark.parametrize("count", [1, None])
def test_the_system_is_asked_for_pages(count):
    chosen = host_memory.list_nodes()[:count]
    mapped = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    agreed = host_memory.put_on(address + 5, 1000, chosen)
    with host_memory.allocating_on(chosen):
        inside = policy_of()

    expected = (3 if len(chosen) > 1 else 1, list(chosen))
    # Some containers forbid to ask, and to look.
    assert (agreed, policy_of(address)) in ((True, expected), (False, None))
    assert inside in (expected, None)
    assert policy_of() in ((0, []), None)
    assert policy_of(address + (1 << 19)) in ((0, []), None)


def test_the_system_is_not_asked_without_nodes(monkeypatch):
    monkeypatch.setattr(host_memory, "_libc", lambda: pytest.fail("asked"))

    with host_memory.allocating_on(()):
        assert not host_memory.put_on(1 << 20, 1000, ())


def test_a_system_that_refuses_leaves_pages_where_they_are(monkeypatch):
    calls = []
    monkeypatch.setattr(host_memory, "_libc", lambda: SimpleNamespace(syscall=lambda *args: calls.append(args) or -1))

    with host_memory.allocating_on((0, 1)):
        assert not host_memory.put_on(1 << 20, 1000, (0, 1))
    # A policy that was not taken is not taken back.
    assert len(calls) == 2


def test_tables_of_the_cpu_take_turns_on_all_nodes(host, monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "put_on", lambda *args: asked.append(args))

    block = memory.allocate(memory._RELEASE_BYTES, "cpu")
    memory.allocate(1000, "cpu")

    assert asked == [(block.view_on_cpu(torch.uint8, (1,)).data_ptr(), memory._RELEASE_BYTES, (0, 1))]


@pytest.mark.parametrize("error", [None, CudaError("cuMemAdvise", 1, "X", "none"), AttributeError("none")], ids=str)
def test_unified_memory_prefers_the_node_of_its_gpu(host, monkeypatch, error):
    told = []

    def advise(address, num_bytes, advice, index, node=None):
        told.append((advice, index, node))
        if node is not None and error is not None:
            raise error

    monkeypatch.setattr(memory, "advise", advise)
    monkeypatch.setattr(memory, "call", lambda *args: 1 << 20)
    monkeypatch.setattr(memory, "abilities", lambda index: SimpleNamespace(managed_without_migration=True))
    flags = SimpleNamespace(CU_MEM_ATTACH_GLOBAL=1)
    monkeypatch.setattr(memory, "load_driver", lambda: SimpleNamespace(CUmemAttach_flags=flags))
    block = memory.Block("unified", GIB, torch.device("cuda", 0))

    memory._allocate_on_host(block)
    # It holds no memory that could be freed.
    block._address = 0

    assert told[:2] == [("SetPreferredLocation", -1, None), ("SetPreferredLocation", -1, 1)]


def flags_of(tensor):
    """Return the system's flags of the memory in the middle of a tensor, from `/proc/self/smaps`."""
    middle, inside = tensor.data_ptr() + tensor.numel() * tensor.element_size() // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            begin, end = (int(number, 16) for number in words[0].split("-"))
            inside = begin <= middle < end
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages")
def test_large_tensors_ask_for_large_pages():
    tensor = torch.empty(64 << 20, dtype=torch.uint8)

    assert host_memory.use_large_pages(tensor) is tensor
    assert "hg" in flags_of(tensor)


def test_small_tensors_and_other_systems_ask_for_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr(host_memory, "_libc", lambda: asked.append(1))

    host_memory.use_large_pages(torch.empty(1 << 20, dtype=torch.uint8))
    monkeypatch.setattr(host_memory, "sys", SimpleNamespace(platform="darwin"))
    host_memory.use_large_pages(torch.empty(64 << 20, dtype=torch.uint8))

    assert asked == []
