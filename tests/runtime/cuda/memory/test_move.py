"""Filling memory from tensors, and moving tensors into it."""

import pytest
import torch

from pyg_direct import progress
from pyg_direct.errors import ArgumentError, PlacementWarning
from pyg_direct.runtime.cuda import memory
from pyg_direct.runtime.cuda.memory import fill, find_block, move


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def small_chunks(monkeypatch):
    """Fills move 64 bytes at a time."""
    monkeypatch.setattr(memory, "_FILL_BYTES", 64)


@pytest.mark.parametrize("shape", [(), (0, 3), (100,), (31, 7), (3, 5, 2)])
def test_fill_copies_everything(small_chunks, shape):
    source = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    target = torch.full(shape, -7)

    fill(target, source)

    assert torch.equal(target, source)


def test_long_fills_show_a_bar(small_chunks, monkeypatch, capfd):
    fill(torch.empty(500), torch.zeros(500), what="features")
    short = capfd.readouterr().err
    monkeypatch.setattr(progress, "PATIENCE", -1)
    fill(torch.empty(500), torch.zeros(500), what="features")
    long = capfd.readouterr().err

    assert "placing features: 100%" in long
    assert short == ""


def test_pages_are_given_back_as_they_are_copied(monkeypatch):
    monkeypatch.setattr(memory, "_FILL_BYTES", 1 << 20)
    source = torch.arange(1 << 20)
    expected, target = source.clone(), torch.full_like(source, -7)

    fill(target, source, release=True)

    assert torch.equal(target, expected)
    assert int((source == 0).sum()) > source.numel() // 2


def test_an_interrupted_move_still_ends_whole(monkeypatch):
    monkeypatch.setattr(memory, "_FILL_BYTES", 1 << 20)
    release, calls = memory.give_back, []

    def interrupt(piece):
        release(piece)
        calls.append(piece)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(memory, "give_back", interrupt)
    source = torch.arange(1 << 20)
    expected, target = source.clone(), torch.full_like(source, -7)

    with pytest.raises(KeyboardInterrupt):
        fill(target, source, release=True)

    assert torch.equal(target, expected)


@pytest.mark.parametrize("source", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)])
def test_fill_from_something_else_is_refused(source):
    with pytest.raises(ArgumentError, match=r"source must have shape \(3,\) and dtype torch.float32, got"):
        fill(torch.zeros(3), source)


def test_a_move_without_a_gpu_leaves_the_tensor_where_it_is(no_gpu):
    tensor = torch.arange(6.0).view(3, 2)
    address = tensor.data_ptr()

    with pytest.warns(PlacementWarning, match="fell back to 'cpu'"):
        block = move(tensor, "unified")

    assert block.placement == "cpu"
    assert tensor.data_ptr() == address == block.view_on_cpu(torch.float32, (3, 2)).data_ptr()
    assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["unified", "pinned"])
@pytest.mark.parametrize("num_rows", [10, (80 << 20) // 512])
def test_a_moved_tensor_is_a_view_with_the_same_contents(placement, num_rows):
    tensor = torch.arange(num_rows * 128, dtype=torch.float32).view(num_rows, 128)
    expected = tensor.clone()

    block = move(tensor, placement, "cuda")

    assert block.placement == placement
    assert tensor.data_ptr() == block.address
    assert torch.equal(tensor, expected)
    assert torch.equal(block.view_on_gpu(torch.float32, (num_rows, 128)).cpu(), expected)
    assert move(tensor, placement, "cuda") is find_block(tensor) is block


@pytest.mark.gpu
def test_a_tensor_that_others_see_is_copied():
    tensor = torch.arange((80 << 20) // 8)
    other = tensor[5:]

    block = move(tensor, "unified", "cuda")

    assert block.placement == "unified"
    assert torch.equal(other, tensor[5:])
    assert other.data_ptr() != tensor[5:].data_ptr()
