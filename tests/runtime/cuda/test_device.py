import gc
import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from pyg_direct.errors import ArgumentError, ArgumentTypeError, CudaError, DeviceError, PygDirectError
from pyg_direct.runtime.cuda import device as driver_module
from pyg_direct.runtime.cuda.device import abilities, call, count_allocated, free_bytes, load_driver, resolve_device

load_anew = load_driver.__wrapped__


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch):
    """torch believes in two GPUs, the second of which is current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.fixture
def fake_driver(monkeypatch):
    """Make a driver whose calls return values that the test sets."""

    class Code(int):
        name = "CUDA_ERROR_OUT_OF_MEMORY"

    driver = SimpleNamespace(Code=Code, cuGetErrorString=lambda code: (0, b"out of memory"))
    monkeypatch.setattr(driver_module, "load_driver", lambda: driver)
    return driver


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), torch.device("cpu", 0)])
def test_without_a_gpu_the_cpu_is_meant(no_gpu, device):
    assert resolve_device(device) == torch.device("cpu")


@pytest.mark.parametrize(("device", "expected"), [
    (None, "cuda:1"), ("cuda", "cuda:1"), (torch.device("cuda"), "cuda:1"), ("cuda:0", "cuda:0"), (0, "cuda:0"),
    (1, "cuda:1"), ("cpu", "cpu"),
])  # fmt: skip
def test_the_current_gpu_is_meant_unless_one_is_named(two_gpus, device, expected):
    assert resolve_device(device) == torch.device(expected)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_a_missing_gpu_is_told(no_gpu, device):
    shown = "0" if device == 0 else f"'{device}'"

    with pytest.raises(DeviceError, match=rf"device={shown} asks for a GPU, but .* leave device out .* `pyg-direct do"):
        resolve_device(device)


@pytest.mark.parametrize("device", ["cuda:2", 2, 7, 256])
def test_a_gpu_beyond_those_there_is_told(two_gpus, device):
    with pytest.raises(DeviceError, match=rf"device={device!r} asks for GPU \d+, but there are 2"):
        resolve_device(device)


@pytest.mark.parametrize(("device", "error", "words"), [
    ("gpu", ArgumentError, "device must name a torch device, got 'gpu'"),
    ("", ArgumentError, "device must name a torch device, got ''"),
    (-1, ArgumentError, "device must .*, got -1"),
    ("meta", ArgumentError, "device must be a CPU or a CUDA device, got 'meta'"),
    (True, ArgumentTypeError, "device must be a torch.device, a name or a GPU index, got True"),
    (1.5, ArgumentTypeError, r"device must be a torch.device, a name or a GPU index, got 1\.5"),
])  # fmt: skip
def test_other_devices_are_refused(two_gpus, device, error, words):
    with pytest.raises(error, match=words):
        resolve_device(device)


def test_missing_bindings_are_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)

    with pytest.raises(DeviceError, match=r"needs the CUDA bindings: pip install '\.\[cu13\]'"):
        load_anew()


def test_a_missing_driver_is_told(monkeypatch):
    def find_no_library(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr("cuda.bindings.driver.cuInit", find_no_library)

    with pytest.raises(DeviceError, match="needs a CUDA driver, and none was found: Failed to dlopen"):
        load_anew()


def test_a_driver_that_does_not_start_is_told(monkeypatch):
    from cuda.bindings.driver import CUresult

    monkeypatch.setattr("cuda.bindings.driver.cuInit", lambda flags: (CUresult.CUDA_ERROR_NO_DEVICE,))

    with pytest.raises(DeviceError, match="cuInit returned CUDA_ERROR_NO_DEVICE"):
        load_anew()


@pytest.mark.parametrize(("returned", "expected"), [((), None), ((5,), 5), ((5, 6), (5, 6))])
def test_calls_return_what_the_driver_does(fake_driver, returned, expected):
    fake_driver.cuSomething = lambda *args: (0, *returned)

    assert call("cuSomething", 1, 2) == expected


def test_error_codes_become_errors(fake_driver):
    fake_driver.cuSomething = lambda: (fake_driver.Code(2),)

    with pytest.raises(
        CudaError, match=r"cuSomething returned CUDA_ERROR_OUT_OF_MEMORY \(2\): out of memory"
    ) as caught:
        call("cuSomething")

    assert (caught.value.call, caught.value.code) == ("cuSomething", 2)
    assert isinstance(caught.value, PygDirectError)


@pytest.mark.gpu
def test_a_gpu_tells_its_abilities():
    got = abilities(0)

    assert got.compute_capability == torch.cuda.get_device_capability(0)
    assert got.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    assert got.driver_version >= 12000


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 700 + 200 - 150), (0.5, 500 - 150), (0.1, 0)])
def test_a_share_of_gpu_memory_bounds_what_is_free(monkeypatch, fraction, expected):
    counts = {"allocated_bytes": {"all": {"current": 150, "peak": 170}}, "reserved_bytes": {"all": {"current": 200}}}
    said = {"mem_get_info": (700, 1000), "memory_stats_as_nested_dict": counts,
            "get_per_process_memory_fraction": fraction}  # fmt: skip
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda index, value=value: value)

    assert free_bytes(0) == expected


@pytest.mark.gpu
def test_allocated_bytes_are_those_that_torch_tells():
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    told = count_allocated(torch.device("cuda", 0))

    # No other allocation of this process happens meanwhile.
    assert told == (torch.cuda.memory_allocated(0), torch.cuda.max_memory_allocated(0), torch.cuda.memory_reserved(0))
    assert told[0] >= kept.numel()


@pytest.mark.gpu
def test_memory_cached_by_torch_counts_as_free():
    torch.cuda.empty_cache()
    # Other processes take memory and give it back meanwhile.
    for _ in range(50):
        before = free_bytes(0)
        kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        used = free_bytes(0)
        del kept
        after = free_bytes(0)
        if before - used == pytest.approx(64 << 20, abs=4 << 20) and after == pytest.approx(before, abs=4 << 20):
            break
        torch.cuda.empty_cache()
    else:
        pytest.fail(f"{before} bytes were free, {used} beside 64 MiB, {after} when these were cached")


def test_tests_of_the_cpu_find_no_gpu():
    assert resolve_device(None).type == "cpu"
    assert torch.cuda.device_count() == 0


def collect_in_child(prepare=lambda: None):
    """Exit code of a forked child that collects garbage: 3 if it deletes an object of this process."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads; the child only collects and leaves.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        prepare()
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Leaves:
    """An object in a cycle, whose deletion ends the process."""

    def __init__(self):
        self.own, self.process = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.process:
            os._exit(3)


def test_children_delete_no_objects_of_the_process_that_uses_a_gpu(monkeypatch):
    registered = {}
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.update(hooks))
    driver_module._keep_garbage_in_children()
    gc.collect()

    Leaves()
    assert collect_in_child() == 3
    Leaves()
    assert collect_in_child(registered["after_in_child"]) == 0


@pytest.mark.gpu
def test_children_delete_no_tensors_that_streams_have_read():
    load_driver()
    rows = torch.ones(1 << 20, device="cuda")
    rows.record_stream(torch.cuda.Stream())
    holder = [rows]
    holder.append(holder)
    del rows, holder

    assert collect_in_child() == 0
