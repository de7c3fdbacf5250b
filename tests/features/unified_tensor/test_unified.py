"""Unified tensors are tensors: saved, printed, copied, differentiated; errors are named."""

import copy
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from pyg_direct import UnifiedTensor, to_unified
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError, MemoryLimitError
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.memory import UnifiedPool, allocate, round_size
from tests.features.contract import DTYPES, bytes_of, make_rows


def run_python(program):
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.full
def test_rows_of_any_dtype_come_bit_for_bit(device, dtype):
    rows = make_rows(dtype=dtype)
    expected = bytes_of(rows)[[5, 0, 39, 5]]

    got = to_unified(rows)[torch.tensor([5, 0, 39, 5], device=device)]

    got = got.on_cpu() if isinstance(got, UnifiedTensor) else got
    assert torch.equal(bytes_of(got), expected)


@pytest.mark.full
def test_the_tensor_becomes_a_view_of_the_same_memory():
    rows = torch.arange(12.0).view(4, 3).clone()

    got = to_unified(rows)

    assert got.tolist() == rows.tolist()
    if torch.cuda.is_available():
        assert got.data_ptr() == rows.data_ptr()


def test_part_of_a_tensor_is_copied():
    rows = torch.arange(12.0).view(4, 3)

    got = to_unified(rows[1:])

    rows.zero_()
    assert got.tolist() == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize("copied", [lambda t: pickle.loads(pickle.dumps(t)), copy.deepcopy, copy.copy],
                         ids=["pickled", "deep", "shallow"])  # fmt: skip
@pytest.mark.parametrize("hint", [True, False])
def test_copies_are_unified(copied, hint):
    tensor = to_unified(torch.arange(3.0), propagatedToCUDA=hint).requires_grad_()

    got = copied(tensor)

    assert type(got) is UnifiedTensor
    assert (got.tolist(), got.propagatedToCUDA, got.requires_grad) == ([0, 1, 2], hint, True)


def test_it_is_saved_and_loaded_without_trusting_the_file():
    file = io.BytesIO()
    torch.save({"x": to_unified(torch.arange(3.0))}, file)
    file.seek(0)

    got = torch.load(file, weights_only=True)["x"]

    assert (type(got), got.tolist()) == (UnifiedTensor, [0, 1, 2])


def test_it_is_printed():
    text = repr(to_unified(torch.tensor([1.0, 2.0])).requires_grad_())

    assert text == "tensor([1., 2.], device='unified', requires_grad=True)"


def test_an_array_shares_its_memory():
    tensor = to_unified(torch.zeros(3))

    tensor.numpy()[1] = 7
    assert tensor.tolist() == [0, 7, 0]
    assert np.asarray(tensor).tolist() == [0, 7, 0]
    with pytest.raises(RuntimeError, match="requires grad"):
        tensor.requires_grad_().numpy()


def test_gradients_flow_through_indexing(device):
    tensor = to_unified(torch.arange(6.0).view(3, 2).clone()).requires_grad_()
    plain = torch.arange(6.0).view(3, 2).requires_grad_()
    ids = torch.tensor([0, 2, 2])

    (tensor[ids.to(device)] * 3).sum().backward()
    (plain[ids] * 3).sum().backward()

    assert tensor.grad.tolist() == plain.grad.tolist()
    assert isinstance(tensor.grad, UnifiedTensor) == (device.type == "cuda")


def test_to_the_cpu_makes_a_tensor_of_its_own():
    tensor = to_unified(torch.arange(6.0).view(3, 2)).requires_grad_()

    for got in (tensor.cpu(), tensor.to("cpu"), tensor.to(torch.ones(1)), tensor.to(tensor.device, torch.float64)):
        assert (type(got), got.tolist()) == (torch.Tensor, tensor.tolist())
        assert got.data_ptr() != tensor.data_ptr()
    tensor.cpu().mul(3).sum().backward()
    assert (type(tensor.grad), tensor.grad.tolist()) == (torch.Tensor, [[3, 3]] * 3)


def test_what_names_no_device_leaves_it_unified():
    tensor = to_unified(torch.arange(24.0).view(1, 2, 3, 4), propagatedToCUDA=False)

    for got in (tensor.to(torch.float64), tensor.to(copy=True), tensor.to(memory_format=torch.channels_last)):
        assert (type(got), got.propagatedToCUDA, got.tolist()) == (UnifiedTensor, False, tensor.tolist())
    assert tensor.to(torch.float32) is tensor
    assert tensor.to(memory_format=torch.channels_last).stride() == (24, 1, 8, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [3, -1, 2**40])
def test_an_id_out_of_range_is_told_at_the_next_use(bad):
    tensor = to_unified(torch.ones(3, 2))

    got = tensor[torch.tensor([0, bad], device="cuda")]

    assert got.tolist() == [[1, 1], [0, 0]]
    with pytest.raises(IdError, match="an earlier read had an id outside at position 1"):
        tensor[torch.tensor([0], device="cuda")]


@pytest.mark.gpu
def test_ids_may_be_strided_and_of_none():
    tensor = to_unified(torch.arange(24.0).view(8, 3))

    assert tensor[torch.arange(8, device="cuda")[::3]].tolist() == tensor.tolist()[::3]
    assert tensor[torch.empty(0, dtype=torch.int64, device="cuda")].shape == (0, 3)


@pytest.mark.gpu
def test_the_cpu_sees_what_the_gpu_wrote_and_the_gpu_what_the_cpu_wrote():
    tensor = to_unified(torch.zeros(1 << 20))

    for step in range(1, 20):
        torch.cuda._sleep(1_000_000)
        tensor.add_(torch.ones(1 << 20, device="cuda"))
        assert tensor[-1].item() == 2 * step - 1
        tensor.on_cpu(for_write=True).add_(1)

    assert tensor.cuda().unique().tolist() == [38]


@pytest.mark.gpu
def test_what_one_stream_wrote_another_one_reads():
    tensor, stream = to_unified(torch.zeros(1 << 20)), torch.cuda.Stream()
    tensor.cuda()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        tensor.add_(torch.ones(1 << 20, device="cuda"))
    got = tensor.cuda()

    assert got.unique().tolist() == [1]


@pytest.mark.gpu
def test_gradients_of_another_stream_are_waited_for():
    tensor = to_unified(torch.zeros(1 << 16, 4)).requires_grad_()
    ids = torch.arange(1 << 16, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    for _ in range(2):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            loss = tensor[ids].sum()
        loss.backward()

    assert tensor.grad.cuda().unique().tolist() == [2]


@pytest.mark.gpu
@pytest.mark.gpus
def test_it_is_copied_to_another_gpu_than_reads_it():
    tensor = to_unified(torch.arange(6.0), device="cuda:0")

    got = tensor.to("cuda:1")

    assert (str(got.device), got.tolist()) == ("cuda:1", [0, 1, 2, 3, 4, 5])


@pytest.mark.gpu
def test_memory_is_recycled_after_the_gpu_has_read_it():
    pool, device = UnifiedPool(), resolve_device("cuda")
    block = pool.take(1000, device)
    address, stream = block.address, torch.cuda.Stream()
    block.streams[stream.cuda_stream] = stream
    del block

    again = pool.take(1500, device)
    other = pool.take(1500, device)

    assert again.address == address
    assert other.address != address
    pool.clear()


@pytest.mark.gpu
def test_a_recycled_tensor_waits_for_readers_of_the_last_one():
    for number in range(50):
        tensor = torch.full((1 << 16,), float(number)).to(to_unified(torch.ones(1)).device)
        tensor = to_unified(tensor) if not isinstance(tensor, UnifiedTensor) else tensor
        torch.cuda._sleep(2_000_000)
        copied = tensor + torch.zeros(1 << 16, device="cuda")
        del tensor
        assert copied.unique().tolist() == [number]


@pytest.mark.parametrize(("num_bytes", "size"), [(1, 4096), (4097, 8192), (3 << 20, 4 << 20), (5 << 20, 6 << 20)])
def test_sizes_are_rounded_to_what_serves_many(num_bytes, size):
    assert round_size(num_bytes) == size


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["unified", "pinned"])
def test_more_than_host_memory_holds_is_refused(placement):
    with pytest.raises(
        MemoryLimitError, match=rf"must fit the \d+ bytes of host memory, got {1 << 50} for {placement}"
    ):
        allocate(1 << 50, placement, "cuda")


@pytest.mark.parametrize(("act", "error", "words"), [
    (lambda: to_unified([1.0]), ArgumentTypeError, "tensor must be a tensor, got list"),
    (lambda: to_unified(torch.ones(2), advise="Faster"), ArgumentError, "advise must be one of cudaMemAdviseSetRead"),
    (lambda: to_unified(torch.ones(2), advise=9), ArgumentError, "got 9"),
])  # fmt: skip
def test_what_makes_no_sense_is_named(act, error, words):
    with pytest.raises(error, match=words):
        act()


def test_without_a_gpu_nothing_can_be_advised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tensor = to_unified(torch.ones(2))

    with pytest.raises(ArgumentError, match="memory that the driver manages, this is of kind 'cpu'"):
        tensor.memAdvise("SetReadMostly")
    with pytest.raises(ArgumentError, match="needs a GPU"):
        tensor.on_gpu()


@pytest.mark.full
def test_the_name_needs_a_call_first():
    assert run_python("""
import torch, pyg_direct
for make in (lambda: torch.ones(3, device="unified"), lambda: pyg_direct.unified_device()):
    try:
        make()
        print("made")
    except RuntimeError:
        print("refused")
print(pyg_direct.to_unified(torch.ones(2)).is_unified)
""").split() == ["refused", "refused", "True"]
