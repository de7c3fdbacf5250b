import gc
import os
import pickle
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyg_direct.errors import (
    ArgumentError,
    ArgumentTypeError,
    CudaError,
    DeviceError,
    ForkedProcessError,
    MemoryLimitError,
    PlacementWarning,
)
from pyg_direct.runtime.cuda import memory
from pyg_direct.runtime.cuda.memory import Block, allocate, allocate_or_fall_back, find_block

ON_HOST = pytest.mark.parametrize("placement", ["unified", "pinned"])


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def refuse(*placements):
    """An `allocate` that cannot have these placements, and the list of those it was asked for."""
    asked = []

    def stand_in(num_bytes, placement, device=None, **options):
        asked.append(placement)
        if placement in placements:
            raise CudaError("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        return allocate(num_bytes, placement, device, **options)

    return stand_in, asked


def run_in_fork(action):
    """Exit code of a forked child: 42 when `action` was refused there, 1 when it was not."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads; the child only raises and leaves.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
        except ForkedProcessError:
            code = 42
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.bool])
def test_cpu_memory_is_seen_through_views(dtype):
    block = allocate(64, "cpu")

    view = block.view_on_cpu(dtype, (2, 3))
    block.view_on_cpu(torch.uint8, (64,)).fill_(1)

    assert (view.shape, view.dtype) == ((2, 3), dtype)
    assert view.view(torch.uint8).unique().tolist() == [1]
    assert (block.placement, block.num_bytes, block.device) == ("cpu", 64, None)


def test_no_bytes_are_memory_too():
    block = allocate(0, "cpu")

    assert block.view_on_cpu(torch.float32, (0, 7)).shape == (0, 7)


def test_ordinary_memory_has_no_view_on_a_gpu():
    block = allocate(8, "cpu")

    with pytest.raises(ArgumentError, match="placement must be one a GPU can read, got 'cpu'"):
        block.view_on_gpu(torch.uint8, (8,))


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ((8, "disk"), ArgumentError, "placement must be one of cuda, unified, pinned, cpu, got 'disk'"),
    ((-1, "cpu"), ArgumentError, "num_bytes must be at least 0, got -1"),
    ((2**62, "cpu"), MemoryLimitError, f"num_bytes must fit host memory, got {2**62}"),
    ((8, "unified", "cpu"), DeviceError, "placement='unified' needs a GPU, got device='cpu'"),
])  # fmt: skip
def test_bad_allocations_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        allocate(*arguments)


@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
def test_a_missing_gpu_is_told(no_gpu, placement):
    with pytest.raises(DeviceError, match="asks for a GPU"):
        allocate(8, placement)


def test_a_view_larger_than_its_block_is_refused():
    block = allocate(64, "cpu")

    with pytest.raises(ArgumentError, match=r"shape must fit the block of 64 bytes, got \(2, 5\) of torch.int64"):
        block.view_on_cpu(torch.int64, (2, 5))


def test_a_block_is_not_pickled():
    with pytest.raises(ArgumentTypeError, match="a block of cpu memory cannot be pickled; send its CPU view instead"):
        pickle.dumps(allocate(8, "cpu"))


@pytest.mark.parametrize(("wanted", "refused", "tried"), [
    ("unified", ["unified", "pinned"], ["unified", "pinned", "cpu"]),
    ("pinned", ["pinned"], ["pinned", "cpu"]),
])  # fmt: skip
def test_placements_fall_back_in_order_with_one_warning(monkeypatch, wanted, refused, tried):
    stand_in, asked = refuse(*refused)
    monkeypatch.setattr(memory, "allocate", stand_in)

    with pytest.warns(PlacementWarning) as told:
        block = allocate_or_fall_back(8, wanted)

    assert (asked, block.placement) == (tried, "cpu")
    assert len(told) == 1
    assert f"placement='{wanted}' fell back to 'cpu'" in str(told[0].message)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(told[0].message)
    assert "the CPU will gather rows, which is slower" in str(told[0].message)


def test_without_a_gpu_unified_memory_is_ordinary_memory(no_gpu):
    with pytest.warns(PlacementWarning, match="fell back to 'cpu' .*asks for a GPU"):
        block = allocate_or_fall_back(8, "unified")

    assert block.placement == "cpu"


def test_what_can_be_had_comes_without_a_warning():
    block = allocate_or_fall_back(8, "cpu")

    assert block.placement == "cpu"


def test_nothing_left_to_fall_back_to_is_an_error(monkeypatch):
    stand_in, asked = refuse("unified", "pinned", "cpu")
    monkeypatch.setattr(memory, "allocate", stand_in)

    with pytest.raises(MemoryLimitError, match="placement='unified' and its fall-backs could not be had"):
        allocate_or_fall_back(8, "unified")

    assert asked == ["unified", "pinned", "cpu"]


def test_ordinary_tensors_belong_to_no_block():
    assert find_block(torch.zeros(3)) is None


@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
def test_forked_children_are_refused(placement):
    block = Block(placement, 8, None)

    assert run_in_fork(lambda: block.address) == 42
    assert run_in_fork(block.check_process) == 42


def test_forked_children_may_use_ordinary_memory():
    block = Block("cpu", 8, None)

    assert run_in_fork(block.check_process) == 1


@pytest.mark.gpu
@ON_HOST
def test_both_sides_see_the_same_bytes(placement):
    block = allocate(4000, placement, "cuda")
    on_cpu, on_gpu = block.view_on_cpu(torch.int32, (10, 100)), block.view_on_gpu(torch.int32, (10, 100))

    on_cpu.copy_(torch.arange(1000).view(10, 100))
    seen_by_gpu = on_gpu.cpu()
    on_gpu[3].fill_(-5)
    torch.cuda.synchronize()

    assert torch.equal(seen_by_gpu, torch.arange(1000, dtype=torch.int32).view(10, 100))
    assert on_cpu[3].tolist() == [-5] * 100
    assert on_cpu[4, 0] == 400
    assert (on_cpu.device.type, on_gpu.device) == ("cpu", torch.device("cuda", 0))
    assert (block.placement, on_cpu.is_shared()) == (placement, False)


@pytest.mark.gpu
def test_gpu_memory_is_seen_by_the_gpu_alone():
    block = allocate(64, "cuda")

    block.view_on_gpu(torch.int64, (8,)).copy_(torch.arange(8))

    assert block.view_on_gpu(torch.int64, (2, 4)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ArgumentError, match="placement must be one the CPU can read, got 'cuda'"):
        block.view_on_cpu(torch.int64, (8,))


@pytest.mark.gpu
@ON_HOST
@pytest.mark.parametrize("side", ["view_on_cpu", "view_on_gpu"])
def test_a_view_keeps_its_block_alive_and_the_last_one_frees_it(placement, side):
    block = allocate(64, placement, "cuda")
    block.view_on_cpu(torch.int64, (8,)).copy_(torch.arange(8))
    view = getattr(block, side)(torch.int64, (8,))[2:]
    alive = weakref.ref(block)

    del block
    gc.collect()
    seen = view.tolist()
    held = alive() is not None
    del view
    gc.collect()

    assert seen == [2, 3, 4, 5, 6, 7]
    assert held
    assert alive() is None


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
def test_no_bytes_have_a_view_on_the_gpu(placement):
    block = allocate(0, placement, "cuda")

    assert block.view_on_gpu(torch.float32, (0, 7)).shape == (0, 7)


@pytest.mark.gpu
def test_unified_memory_falls_back_to_pinned(monkeypatch):
    stand_in, asked = refuse("unified")
    monkeypatch.setattr(memory, "allocate", stand_in)

    with pytest.warns(PlacementWarning, match="placement='unified' fell back to 'pinned'") as told:
        block = allocate_or_fall_back(64, "unified", "cuda")

    assert (asked, block.placement, len(told)) == (["unified", "pinned"], "pinned", 1)
    assert block.view_on_gpu(torch.uint8, (64,)).is_cuda


@pytest.mark.gpu
def test_more_than_the_gpu_has_is_refused():
    with pytest.raises(MemoryLimitError, match=f"num_bytes must fit free GPU memory, got {1 << 45}"):
        allocate(1 << 45, "cuda")


@pytest.mark.gpu
@ON_HOST
def test_forked_children_of_a_gpu_process_are_refused(placement):
    block = allocate(64, placement, "cuda")
    on_cpu = block.view_on_cpu(torch.uint8, (64,)).fill_(9)

    codes = [run_in_fork(lambda: block.view_on_gpu(torch.uint8, (64,))), run_in_fork(lambda: block.address)]

    assert codes == [42, 42]
    assert on_cpu.tolist() == [9] * 64


@pytest.mark.gpu
def test_threads_allocate_and_free_beside_each_other():
    def use(number):
        block = allocate(1 << 16, ("unified", "pinned")[number % 2], "cuda")
        block.view_on_cpu(torch.int64, (1 << 13,)).fill_(number)
        return int(block.view_on_gpu(torch.int64, (1 << 13,)).sum())

    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(use, range(40)))

    assert sums == [number << 13 for number in range(40)]
