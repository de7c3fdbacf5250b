"""A driver that fails at any call: allocated memory is freed, the code is named, and other memory is found."""

import ctypes
import gc
from contextlib import nullcontext
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch

from pyg_direct.errors import CudaError, MemoryLimitError, PlacementWarning
from pyg_direct.runtime.cuda import device as driver_module, memory
from pyg_direct.runtime.cuda.launch import OPEN, Launcher, load_function
from pyg_direct.runtime.cuda.memory import allocate, allocate_or_fall_back
from pyg_direct.runtime.host.shared_memory import SharedMemory, pin

CODES = {2: "CUDA_ERROR_OUT_OF_MEMORY", 700: "CUDA_ERROR_ILLEGAL_ADDRESS", 719: "CUDA_ERROR_LAUNCH_FAILED",
         801: "CUDA_ERROR_NOT_SUPPORTED", 999: "CUDA_ERROR_UNKNOWN"}  # fmt: skip
# Driver calls of an allocation.
STEPS = {
    "unified": ["cuMemAllocManaged", "cuMemAdvise_v2"],
    "pinned": ["cuMemHostAlloc"],
}


class Code(int):
    """A return code of the driver."""

    @property
    def name(self):
        return CODES[self]


class Driver:
    """The functions that allocating and launching call, over ordinary memory; some of them fail."""

    CUmemAttach_flags = SimpleNamespace(CU_MEM_ATTACH_GLOBAL=1)
    CUmem_advise = SimpleNamespace(CU_MEM_ADVISE_SET_PREFERRED_LOCATION=3, CU_MEM_ADVISE_SET_ACCESSED_BY=5)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_HOST=2, CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemLocation = SimpleNamespace
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1,
                                           CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9)  # fmt: skip

    def __init__(self):
        self.fails, self.memory, self.launches, self.attributes = {}, {}, 0, []
        self.has_context = True

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*args):
            left = self.fails.get(name)
            if left and left[0] > 0:
                left[0] -= 1
                return (Code(left[1]),)
            return (0, *getattr(self, f"do_{name}", lambda *_: ())(*args))

        return function

    def fail(self, name, code):
        """The next call of the function fails."""
        self.fails[name] = [1, code]

    def is_used(self):
        """Report whether memory remains after its last reference."""
        if self.memory:
            gc.collect()
        return bool(self.memory)

    def take(self, num_bytes):
        block = torch.zeros(num_bytes, dtype=torch.uint8)
        self.memory[block.data_ptr()] = block
        return (block.data_ptr(),)

    def do_cuMemAllocManaged(self, num_bytes, flags):  # noqa: N802
        return self.take(num_bytes)

    def do_cuMemHostAlloc(self, num_bytes, flags):  # noqa: N802
        return self.take(num_bytes)

    def do_cuMemFree(self, address):  # noqa: N802
        assert self.memory[address] is not None, "memory that is registered only"
        del self.memory[address]
        return ()

    do_cuMemFreeHost = do_cuMemFree  # noqa: N815

    def do_cuMemHostRegister(self, address, num_bytes, flags):  # noqa: N802
        assert address not in self.memory
        self.memory[address] = None
        return ()

    def do_cuMemHostUnregister(self, address):  # noqa: N802
        assert self.memory.pop(address) is None
        return ()

    def do_cuGetErrorString(self, code):  # noqa: N802
        return (f"text of {int(code)}".encode(),)

    def do_cuCtxGetCurrent(self):  # noqa: N802
        return (int(self.has_context),)

    def do_cuCtxSetCurrent(self, context):  # noqa: N802
        self.has_context = True
        return ()

    def do_cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        return (0,)

    def do_cuModuleLoadData(self, ptx):  # noqa: N802
        return ("module",)

    def do_cuModuleGetFunction(self, module, name):  # noqa: N802
        return ("function",)

    def do_cuFuncGetAttribute(self, attribute, function):  # noqa: N802
        return (0,)

    def do_cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        self.attributes.append((attribute, value))
        return ()

    def do_cuLaunchKernel(self, *args):  # noqa: N802
        self.launches, self.launched = self.launches + 1, args
        return ()

    def CUstream(self, stream):  # noqa: N802
        return stream


@pytest.fixture
def driver(monkeypatch):
    """One GPU by the word of this driver."""
    made = Driver()
    for module in (driver_module, memory):
        monkeypatch.setattr(module, "load_driver", lambda: made)
    monkeypatch.setattr("pyg_direct.runtime.cuda.device.load_driver", lambda: made)
    monkeypatch.setattr("pyg_direct.runtime.cuda.launch.load_driver", lambda: made)
    monkeypatch.setattr(memory, "resolve_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(memory, "abilities", lambda index: SimpleNamespace(managed_without_migration=True))
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    yield made
    assert not made.is_used(), "memory of the driver is left"


def allocate_as(kind, num_bytes=64, how=allocate):
    return how(num_bytes, kind, "cuda")


@pytest.mark.parametrize("kind", STEPS)
def test_memory_is_had_written_and_given_back(driver, kind):
    block = allocate_as(kind)

    block.view_on_cpu(torch.int64, (8,)).fill_(7)

    assert len(driver.memory) == 1
    assert block.view_on_cpu(torch.int64, (8,)).tolist() == [7] * 8


def test_memory_of_another_owner_is_locked_once_and_unlocked(driver):
    shared = SharedMemory(64)
    locked = pin(shared, torch.device("cuda", 0))
    assert pin(shared, torch.device("cuda", 0)) is locked
    assert list(driver.memory) == [shared.bytes.data_ptr()]

    del locked

    assert not driver.is_used()
    assert pin(shared, torch.device("cuda", 0)).address == shared.bytes.data_ptr()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("kind", "step"), [(kind, step) for kind, steps in STEPS.items() for step in steps])
def test_any_failing_call_is_named_and_leaves_nothing(driver, kind, step, code):
    driver.fail(step, code)

    with pytest.raises(CudaError, match=rf"{step} returned {CODES[code]} \({code}\): text of {code}"):
        allocate_as(kind)

    assert not driver.is_used()


@pytest.mark.parametrize("code", [2, 801, 999])
@pytest.mark.parametrize("step", STEPS["unified"])
def test_unified_memory_that_fails_becomes_pinned(driver, step, code):
    driver.fail(step, code)

    with pytest.warns(PlacementWarning, match=rf"fell back to 'pinned' \(unified: {step} returned {CODES[code]}"):
        block = allocate_as("unified", how=allocate_or_fall_back)

    assert block.placement == "pinned"
    assert len(driver.memory) == 1


def test_memory_that_cannot_be_locked_stays_ordinary(driver):
    driver.fail("cuMemAllocManaged", 2)
    driver.fail("cuMemHostAlloc", 2)

    with pytest.warns(PlacementWarning, match="fell back to 'cpu' .*the CPU will gather rows"):
        block = allocate_as("unified", how=allocate_or_fall_back)

    assert (block.placement, driver.memory) == ("cpu", {})


def test_no_host_memory_is_told(driver, monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(memory.torch, "empty", refuse)

    with pytest.raises(MemoryLimitError, match="num_bytes must fit host memory, got 64: DefaultCPUAllocator"):
        allocate(64, "cpu")


@pytest.mark.parametrize("step", ["cuMemFree", "cuMemFreeHost"])
def test_memory_that_cannot_be_freed_ends_no_program(driver, step):
    block = allocate_as({"cuMemFree": "unified", "cuMemFreeHost": "pinned"}[step])
    driver.fail(step, 700)

    del block

    # The driver keeps it.
    assert len(driver.memory) == 1
    driver.memory.clear()


class TestLauncher:
    """A kernel that takes one number."""

    PTX = ".visible .entry kernel(.param .u64 a)"

    @pytest.fixture(autouse=True)
    def _stream(self, driver, monkeypatch):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)

    def make(self):
        code = SimpleNamespace(entry="kernel", ptx=self.PTX)
        return Launcher(code, [SimpleNamespace(is_array=False, code="i8", name="a")], 0).launch

    @pytest.mark.parametrize("step", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute"])
    @pytest.mark.parametrize("code", [2, 719])
    def test_a_module_that_cannot_be_loaded_is_told(self, driver, step, code):
        driver.fail(step, code)

        with pytest.raises(CudaError, match=rf"{step} returned {CODES[code]}"):
            self.make()

    @pytest.mark.parametrize(("shared_bytes", "percent"), [(1, 1), (98_304, 43), (233_472, 100), (300_000, 100)])
    def test_what_a_kernel_does_not_share_becomes_cache(self, driver, monkeypatch, shared_bytes, percent):
        monkeypatch.setattr(
            "pyg_direct.runtime.cuda.launch.abilities", lambda index: SimpleNamespace(shared_bytes=233_472)
        )

        load_function(SimpleNamespace(entry="kernel", ptx=self.PTX), 0, shared_bytes)

        carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        assert driver.attributes == [(carveout, percent)]

    @pytest.mark.parametrize("code", CODES)
    def test_a_launch_that_fails_is_told_and_the_next_one_runs(self, driver, code):
        launch = self.make()
        driver.fail("cuLaunchKernel", code)

        with pytest.raises(CudaError, match=rf"cuLaunchKernel returned {CODES[code]} \({code}\): grid 3, block 32"):
            launch(3, 32, (5,))
        launch(3, 32, (5,))

        assert driver.launches == 1

    @pytest.mark.parametrize("is_short", [False, True], ids=["numba", "mlir"])
    def test_the_driver_reads_each_argument_where_it_lies(self, driver, is_short):
        items, numbers = torch.arange(7), torch.arange(5.0)
        per_array = 5 if is_short else 7
        ptx = f".visible .entry kernel({', '.join(['.param .u64 a'] * (2 * per_array + 2))})"
        kinds = [("i8", True), ("i4", False), ("f4", True), ("f8", False)]
        parameters = [SimpleNamespace(code=code, is_array=is_array) for code, is_array in kinds]
        launch = Launcher(SimpleNamespace(entry="kernel", ptx=ptx), parameters, 0).launch

        launch(3, 32, (items, -5, numbers, 0.25), stream=9)

        function, *sizes, handle, address, _ = driver.launched
        pointers = (ctypes.c_void_p * (2 * per_array + 2)).from_address(address)
        words = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
        at = items.data_ptr()
        assert (function, handle, sizes) == ("function", 9, [3, 1, 1, 32, 1, 1, 0])
        assert words[:per_array] == ([at, at, 0, 7, 1] if is_short else [0, 0, 7, 8, at, 7, 8])
        assert ctypes.c_int32.from_address(pointers[per_array]).value == -5
        assert numbers.data_ptr() in words[per_array + 1 : -1]
        assert ctypes.c_double.from_address(pointers[-1]).value == 0.25

    @pytest.mark.parametrize("is_short", [False, True], ids=["numba", "mlir"])
    def test_settled_arguments_are_read_beside_those_of_each_launch(self, driver, is_short):
        items, numbers, per_array = torch.arange(7), torch.arange(5.0), 5 if is_short else 7
        ptx = f".visible .entry kernel({', '.join(['.param .u64 a'] * (2 * per_array + 2))})"
        kinds = [("i8", True), ("i4", False), ("f4", True), ("f8", False)]
        parameters = [SimpleNamespace(code=code, is_array=is_array) for code, is_array in kinds]
        launcher = Launcher(SimpleNamespace(entry="kernel", ptx=ptx), parameters, 0)

        launch = launcher.settle((items, OPEN, OPEN, 0.25))
        found = []
        for value, array in ((-5, numbers), (6, numbers[2:])):
            launch(3, 32, (value, array), stream=9)
            pointers = (ctypes.c_void_p * (2 * per_array + 2)).from_address(driver.launched[9])
            words = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
            found.append((words[:per_array], ctypes.c_int32.from_address(pointers[per_array]).value,
                          words[per_array + 1 : -1], ctypes.c_double.from_address(pointers[-1]).value))  # fmt: skip

        def as_passed(array):
            at, length, item = array.data_ptr(), array.numel(), array.itemsize
            return [at, at, 0, length, 1] if is_short else [0, 0, length, item, at, length, item]

        assert found == [(as_passed(items), -5, as_passed(numbers), 0.25),
                         (as_passed(items), 6, as_passed(numbers[2:]), 0.25)]  # fmt: skip
        assert launcher.settle((items, OPEN, OPEN, 0.5)) is not launch

    def test_each_stream_has_parameters_of_its_own(self, driver):
        code = SimpleNamespace(entry="kernel", ptx=".visible .entry kernel(.param .u64 a, .param .u64 b)")
        number = SimpleNamespace(is_array=False, code="i8")
        launch = Launcher(code, [number, number], 0).settle((OPEN, 4))

        places = []
        for stream in (8, 9, 8):
            launch(1, 32, (stream,), stream=stream)
            places.append(driver.launched[9])

        assert places[0] == places[2] != places[1]
        assert set(launch.bound) == {(8, get_ident()), (9, get_ident())}

    def test_a_new_thread_with_the_number_of_an_old_one_launches(self, driver, monkeypatch):
        monkeypatch.setattr("pyg_direct.runtime.cuda.device._primary_context", lambda index: "context")
        launch = self.make()
        launch(3, 32, (5,))
        driver.has_context = False
        driver.fail("cuLaunchKernel", 719)

        launch(3, 32, (5,))

        assert driver.has_context
        assert driver.launches == 2
