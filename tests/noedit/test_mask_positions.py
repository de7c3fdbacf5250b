"""Rows of masks that come back are those of torch, and are read by kept positions."""

import copy
import gc

import pytest
import torch
from torch import Tensor

import pyg_direct
from pyg_direct.nn.replay.model_replay import ordinary_passes
from pyg_direct.noedit import mask_positions

N = 50


@pytest.fixture
def device(real_device, monkeypatch):
    """Masks of a CPU are treated as on a GPU."""
    monkeypatch.setattr(mask_positions, "_is_on_gpu", lambda mask: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pyg_direct.install(device="cpu", replay=False)
    mask_positions._MET.clear()
    yield real_device
    pyg_direct.uninstall()
    assert "__getitem__" not in vars(Tensor)


@pytest.fixture
def mask(device):
    return (torch.arange(N) % 3 == 1).to(device)


def list_places(mask):
    return [place for place, is_true in enumerate(mask.tolist()) if is_true]


def read_often(rows, mask, times=mask_positions._OFTEN + 2):
    """Return the rows of the last read, and whether positions are kept."""
    for _ in range(times):
        out = rows[mask]
    met = mask_positions._MET.get(id(mask))
    return out, met is not None and met.positions is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(N,), (N, 3), (N, 0)])
def test_rows_are_those_of_torch(mask, dtype, shape):
    rows = (torch.randn(shape) * 3).to(mask.device, dtype)

    out, is_kept = read_often(rows, mask)

    assert is_kept
    assert torch.equal(out, rows[list_places(mask)])
    assert out.is_contiguous()
    assert out.dtype == dtype


def test_gradients_are_equal_bit_for_bit(mask):
    rows, found = torch.randn(N, 4, device=mask.device, requires_grad=True), []
    for index in (mask.clone(), mask):
        read_often(rows, mask)
        out = rows[index]
        (first,) = torch.autograd.grad(out.pow(3).sum(), rows, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), rows)
        found.append((out, first, second))

    assert "IndexSelect" in out.grad_fn.name()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def write(mask):
    mask[0] = True


def replace_data(mask):
    mask.data = ~mask.clone()


@pytest.mark.parametrize("change", [write, replace_data])
def test_a_changed_mask_is_read_again(mask, change):
    rows = torch.arange(N, device=mask.device)
    read_often(rows, mask)

    change(mask)

    for _ in range(8):
        assert rows[mask].tolist() == list_places(mask)


def test_other_reads_are_torchs(mask):
    rows = torch.randn(N, 6, device=mask.device)
    read_often(rows, mask)

    assert torch.equal(rows.t().contiguous().t()[mask], rows[mask])
    assert torch.equal(rows[mask, 0], rows[:, 0][mask])
    assert torch.equal(rows[3:5], torch.stack([rows[3], rows[4]]))
    assert torch.equal(rows[:, torch.tensor([0, 2])], torch.stack([rows[:, 0], rows[:, 2]], 1))
    assert rows[mask[:, None].expand(N, 6)].shape == (int(mask.sum()) * 6,)
    assert torch.nn.Parameter(rows)[mask].requires_grad
    with pytest.raises(IndexError, match="shape of the mask"):
        rows[1:][mask]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_traces_and_recordings_keep_the_mask(mask):
    rows = torch.randn(N, 2)
    read_often(rows.to(mask.device), mask)
    other = ~mask.cpu()

    traced = torch.jit.trace(lambda values, given: values[given], (rows, mask.cpu()))
    with ordinary_passes:
        inside = read_often(rows, other)

    assert torch.equal(traced(rows, other), inside[0])
    assert not inside[1]


def test_inference_and_training_share_positions(mask):
    rows = torch.randn(N, 2, device=mask.device)
    with torch.inference_mode():
        assert read_often(rows, mask)[1]
    leaf = rows.clone().requires_grad_()

    leaf[mask].sum().backward()

    assert torch.equal(leaf.grad, mask[:, None].expand(N, 2).to(leaf.dtype))


def test_positions_live_as_long_as_the_mask(device):
    mask = (torch.arange(N) % 2 == 0).to(device)
    read_often(torch.arange(N, device=device), mask)
    copied, place = copy.deepcopy(mask), id(mask)
    assert len(mask_positions._MET) == 1

    del mask
    gc.collect()

    assert place not in mask_positions._MET
    assert copied.sum() == N // 2
