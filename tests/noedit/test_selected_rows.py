"""Rows by masks and ids that come back: as torch reads them, with as few waits as can be."""

import gc
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import pyg_direct
from pyg_direct.noedit import selected_rows
from pyg_direct.noedit.selected_rows import make_getitem

MASK, IDS = [True, False, True, True, False], [3, 0, 4]


@pytest.fixture
def device(real_device, monkeypatch):
    """A device whose rows are read by known ids, as on a GPU."""
    monkeypatch.setattr(selected_rows, "_is_near", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "__getitem__", make_getitem(torch.Tensor.__getitem__))
    monkeypatch.setattr(selected_rows, "_MET", {})
    return real_device


@pytest.fixture
def table(device):
    return torch.arange(10.0, device=device).view(5, 2).requires_grad_()


def name_read(rows):
    """Return the operation that made rows."""
    return type(rows.grad_fn).__name__.removesuffix("Backward0")


def read_often(table, index, times=12):
    for _ in range(times):
        rows = table[index]
    return rows


@pytest.mark.parametrize("values", [MASK, [False] * 5, [True] * 5, IDS, [2]], ids=str)
def test_rows_and_gradients_are_those_of_torch(table, values):
    index = torch.tensor(values, device=table.device)
    expected = table[index]
    pull = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, table, pull, create_graph=True)

    rows = read_often(table, index)

    assert (name_read(expected), name_read(rows)) == ("Index", "IndexSelect")
    assert torch.equal(rows, expected)
    assert torch.equal(torch.autograd.grad(rows, table, pull)[0], wanted)
    assert torch.autograd.gradgradcheck(lambda x: x[index].square(), table.double().detach().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16], ids=str)
def test_rows_without_gradient_may_be_of_any_kind(device, dtype):
    mask = torch.tensor(MASK, device=device)
    for table in (torch.ones(5, 3, device=device).to(dtype), torch.ones(5, device=device).to(dtype)):
        assert torch.equal(read_often(table, mask), table[:3])


def test_a_mask_is_read_again_after_a_write(table):
    mask = torch.tensor(MASK, device=table.device)
    assert len(read_often(table, mask)) == 3

    mask[1] = True

    assert len(table[mask]) == 4
    assert len(read_often(table, mask)) == 4


@pytest.mark.parametrize("values", [[1, 1], [-1, 0], [], [0, -5]], ids=str)
def test_ids_that_repeat_or_count_from_the_end_are_left_to_torch(table, values):
    ids = torch.tensor(values, dtype=torch.int64, device=table.device)

    rows = read_often(table, ids)

    assert name_read(rows) == "Index"
    assert rows.tolist() == [table.tolist()[place] for place in values]


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "case", ["slice", "number", "list", "pair", "other length", "matrix", "column", "own", "uint8"]
)
def test_other_reads_are_those_of_torch(table, case):
    mask = torch.tensor(MASK, device=table.device)
    given, index = {
        "slice": (table, slice(1, 3)),
        "number": (table, 2),
        "list": (table, MASK),
        "pair": (table, (mask, 1)),
        "other length": (table, mask[:4]),
        "matrix": (table, torch.stack([mask, mask], 1)),
        "column": (table.t(), torch.tensor([1, 0], device=table.device)),
        "own": (table.detach().as_subclass(Own), mask),
        "uint8": (table.detach().to(torch.uint8), mask),
    }[case]

    for _ in range(12):
        try:
            found = given[index]
        except IndexError as error:
            found = str(error)

    if case == "other length":
        assert "does not match" in found
    else:
        assert type(found) is (Own if case == "own" else torch.Tensor)
        assert torch.equal(found, torch._C.TensorBase.__getitem__(given, index))
        assert case == "own" or found.grad_fn is None or name_read(found) != "IndexSelect"


def test_nothing_is_remembered_where_calls_are_watched_or_transformed(table):
    mask = torch.tensor(MASK, device=table.device)
    read_often(table, mask)

    with FlopCounterMode(display=False):
        assert name_read(table[mask]) == "Index"
    with torch.inference_mode():
        inner = torch.tensor(MASK, device=table.device)
        assert len(read_often(table, inner)) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(lambda x, index: x[index], (table, mask))
        assert len(traced(table, ~mask)) == 2
    mapped = torch.func.vmap(lambda x: x[torch.tensor([1, 0])])(torch.ones(3, 2, 2))
    assert mapped.shape == (3, 2, 2)
    compiled = torch.compile(lambda x, ids: x[ids] * 2, backend="eager", fullgraph=True)
    assert compiled(table, mask).shape == (3, 2)


def test_rows_first_read_in_inference_mode_take_gradients_later(table):
    mask = torch.tensor(MASK, device=table.device)
    with torch.inference_mode():
        read_often(table.detach(), mask)

    table[mask].sum().backward()

    assert table.grad.sum() == 6


def test_an_index_that_is_gone_is_forgotten(table):
    mask = torch.tensor(MASK, device=table.device)
    read_often(table, mask)
    assert len(selected_rows._MET) == 1

    del mask
    gc.collect()

    assert not selected_rows._MET


def test_a_recording_reads_the_mask_again(table, monkeypatch):
    mask = torch.tensor(MASK, device=table.device)
    read_often(table, mask)

    monkeypatch.setattr(selected_rows, "_is_watched", lambda: True)

    assert name_read(table[mask]) == "Index"


def test_programs_read_rows_so_on_a_gpu_alone():
    own = vars(torch.Tensor).get("__getitem__")
    pyg_direct.install(device="cpu")
    try:
        assert ("__getitem__" in vars(torch.Tensor)) is (own is not None or torch.cuda.is_available())
    finally:
        pyg_direct.uninstall()
    assert vars(torch.Tensor).get("__getitem__") is own


@pytest.mark.gpu
def test_programs_read_rows_of_a_gpu_without_a_wait():
    table, mask = torch.rand(5, 2, device="cuda", requires_grad=True), torch.tensor(MASK, device="cuda")
    expected = table[mask]
    pyg_direct.install()
    try:
        rows = read_often(table, mask)
    finally:
        pyg_direct.uninstall()

    assert name_read(rows) == "IndexSelect"
    assert torch.equal(rows, expected)
