import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyg_direct.compiler.jit import cuda, gpu_kernel
from pyg_direct.errors import CudaError
from pyg_direct.kernels.sampling.random import draw_bits_gpu
from pyg_direct.ops.run_kernel import run_gpu
from pyg_direct.ops.sampling.draw_random import draw_bits
from pyg_direct.runtime.cuda.device import abilities, call
from pyg_direct.runtime.cuda.graph_capture import CapturedGraph, fill_words
from pyg_direct.runtime.cuda.launch import Launcher
from pyg_direct.runtime.cuda.memory import allocate

# One scalar of each kind, at an end of its range.
SCALARS = [-128, 255, -(2**15), 2**16 - 1, -(2**31), 2**32 - 1, -(2**63), 2**64 - 1, 0.1, 0.1]


@gpu_kernel("i1 u1 i2 u2 i4 u4 i8 u8 f4 f8 i8[] f8[] u1[]")
def write_scalars_gpu(a, b, c, d, e, f, g, h, i, j, integers, floats, empty):
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        integers[0], integers[1], integers[2], integers[3] = a, b, c, d
        integers[4], integers[5], integers[6], integers[7] = e, f, g, h
        integers[8] = empty.shape[0]
        floats[0], floats[1] = i, j


def measure_launch_us(count=200):
    """So few launches, as the GPU, which others may have for a while, queues a thousand before a launch waits."""
    items, out = torch.arange(10, device="cuda"), torch.empty(10, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run_gpu(draw_bits_gpu, 1, 7, items, 0, out)
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / count * 1e6


def find_least(measure, bound, seconds=10.0):
    """Return the least of several measurements: up to the first below `bound`, otherwise of all within these seconds.

    Other processes only ever add to a round, but may add to all of a moment: 35 of them take no more than that.
    """
    least, until = measure(), time.perf_counter() + seconds
    while least >= bound and time.perf_counter() < until:
        least = min(least, measure())
    return least


def copy_words(target, source, stream):
    """Enqueue a copy of as many bytes as `source` has."""
    call("cuMemcpyAsync", target.data_ptr(), source.data_ptr(), source.numel() * source.element_size(), stream)


def test_words_are_filled(device):
    target = torch.zeros(8, dtype=torch.int64, device=device)
    stream = torch.cuda.current_stream().cuda_stream if target.is_cuda else 0

    fill_words(target, 0x7F7F7F7F, stream)

    assert target.tolist() == [0x7F7F7F7F_7F7F7F7F] * 8


@pytest.mark.gpu
def test_every_kind_of_argument_arrives():
    integers = torch.full((9,), -7, device="cuda")
    floats = torch.full((2,), -7.0, dtype=torch.float64, device="cuda")
    empty = torch.empty(0, dtype=torch.uint8, device="cuda")

    run_gpu(write_scalars_gpu, 1, *SCALARS, integers, floats, empty)

    # A u8 is stored into an int64.
    assert integers.tolist() == [*SCALARS[:7], -1, 0]
    assert floats.tolist() == [float(torch.tensor(0.1)), 0.1]


@pytest.mark.gpu
def test_kernels_run_on_the_current_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        # Late items show a launch on another stream, which would read their old values.
        items = torch.zeros(5, dtype=torch.int64, device="cuda") + 3

        got = draw_bits(items, key=1)
    stream.synchronize()

    assert torch.equal(got, draw_bits(torch.full((5,), 3, device="cuda"), key=1))


@pytest.mark.gpu
def test_launch_takes_microseconds():
    measure_launch_us()

    # 5 us is the goal and a row of the benchmarks; a shared machine is given some room.
    assert find_least(measure_launch_us, 8) < 8


def test_a_busy_while_hides_no_fast_round():
    # As of a machine that others keep busy for longer than the rounds of one moment take.
    rounds = iter([11.0] * 40 + [9.0, 6.0, 5.0])

    assert find_least(lambda: next(rounds), 8) == 6
    assert find_least(lambda: 9.0, 8, seconds=0.01) == 9


@pytest.mark.gpu
def test_a_launch_that_cannot_be_is_told():
    items, out = torch.arange(3, device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda")
    run_gpu(draw_bits_gpu, 1, 7, items, 0, out)
    code = draw_bits_gpu.compile(abilities(0).compute_capability, {})
    launch = Launcher(code, draw_bits_gpu.parameters({}), 0).launch

    with pytest.raises(CudaError, match=r"cuLaunchKernel returned CUDA_ERROR_INVALID_VALUE \(1\): grid 1, block 65536"):
        launch(1, 65536, (7, items, 0, out))

    assert torch.equal(draw_bits(items, key=7), out)


@pytest.mark.gpu
def test_replays_give_identical_bytes():
    items, out = torch.arange(1000, device="cuda"), torch.full((1000,), -7, device="cuda")
    run_gpu(draw_bits_gpu, 4, 7, items, 0, out)

    def record(stream):
        fill_words(out, 0, stream)
        run_gpu(draw_bits_gpu, 4, 9, items, 0, out, stream=stream)

    graph = CapturedGraph(record, 0)
    results = []
    for _ in range(2):
        out.fill_(-7)
        graph.replay()
        results.append(out.clone())

    assert graph.num_nodes == 2
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], draw_bits(items, key=9))


@pytest.mark.gpu
def test_a_new_thread_launches_captures_and_replays():
    items, out = torch.arange(100, device="cuda"), torch.zeros(100, dtype=torch.int64, device="cuda")
    expected = draw_bits(items, key=7)
    twice = torch.zeros_like(out)

    def work():
        # Torch has made no context current in this thread.
        run_gpu(draw_bits_gpu, 1, 7, items, 0, out, stream=0)
        graph = CapturedGraph(lambda stream: run_gpu(draw_bits_gpu, 1, 7, items, 0, twice, stream=stream), 0)
        graph.replay(0)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()

    assert torch.equal(out, expected)
    assert torch.equal(twice, expected)


@pytest.mark.gpu
def test_replays_read_what_lies_there_then():
    source, target = torch.tensor([1, 2], device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    graph = CapturedGraph(lambda stream: copy_words(target, source, stream), 0)
    source.fill_(5)

    graph.replay()

    assert target.tolist() == [5, 5]


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_nothing_behind():
    def record(stream):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        CapturedGraph(record, 0)

    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["unified", "pinned"])
def test_memory_and_graphs_that_go_during_a_capture_do_not_end_it(placement):
    items, out = torch.arange(8, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
    run_gpu(draw_bits_gpu, 1, 7, items, 0, out)
    doomed = [allocate(1 << 20, placement, "cuda"), CapturedGraph(lambda stream: fill_words(out, 0, stream), 0)]

    def record(stream):
        doomed.clear()
        run_gpu(draw_bits_gpu, 1, 9, items, 0, out, stream=stream)

    graph = CapturedGraph(record, 0)
    graph.replay()

    assert not doomed
    assert torch.equal(out, draw_bits(items, key=9))


@pytest.mark.gpu
def test_memory_that_goes_during_a_users_capture_does_not_end_it():
    block, total = allocate(1 << 20, "unified", "cuda"), torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total += 1
        del block
    graph.replay()

    assert total.tolist() == [1, 1, 1, 1]
