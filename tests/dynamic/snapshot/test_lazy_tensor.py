"""Tensors that are copied when read: equal to ordinary ones, and honest about having been written to."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch_geometric.nn import GCNConv

from pyg_direct.dynamic.snapshot import LazyTensor, find_tag, tag

HOST = torch.device("cpu")


@pytest.fixture
def rows():
    return torch.randn(3, 4)


def make(tensor):
    fetched = []

    def load():
        fetched.append(1)
        return tensor.clone()

    return tag(LazyTensor(tensor, HOST, load), "plan", 1, "x"), fetched


def test_nothing_is_fetched_for_its_shape(rows):
    lazy, fetched = make(rows)

    assert (lazy.shape, lazy.dtype, lazy.device, lazy.size(0), lazy.dim()) == (rows.shape, rows.dtype, HOST, 3, 2)
    assert lazy.to(HOST) is lazy
    assert "LazyTensor(shape=(3, 4)" in repr(lazy)
    assert not fetched


def test_operations_and_gradients_are_those_of_the_tensor(rows):
    lazy, fetched = make(rows)
    weight = torch.randn(2, 4, requires_grad=True)

    out = torch.nn.functional.linear(lazy, weight)
    out.sum().backward()

    assert type(out) is torch.Tensor
    assert torch.equal(out, rows @ weight.T)
    torch.testing.assert_close(weight.grad, rows.sum(0).expand(2, 4))
    assert len(fetched) == 1
    assert lazy.tolist() == rows.tolist()
    assert (lazy.numpy() == rows.numpy()).all()


def test_convolutions_of_pyg_take_it(rows):
    edges = torch.tensor([[0, 1], [1, 2]])
    conv = GCNConv(4, 2)

    got = conv(make(rows)[0], LazyTensor(edges, HOST, edges.clone))

    assert torch.equal(got, conv(rows, edges))


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.view(-1).add_(1), lambda x: x[0].zero_()])
def test_what_was_written_to_is_known_no_more(rows, write):
    lazy, _ = make(rows)
    assert find_tag(lazy, "x").time == 1

    write(lazy)

    assert find_tag(lazy, "x") is None
    assert not torch.equal(lazy + 0, rows)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), torch.clone])
def test_copies_are_ordinary(rows, duplicate):
    lazy, _ = make(rows)

    again = duplicate(lazy)

    assert type(again) is torch.Tensor
    assert torch.equal(again, rows)
    assert find_tag(again, "x") is None


@pytest.mark.parametrize(
    "take", [torch.from_dlpack, np.from_dlpack, lambda x: x.share_memory_(), lambda x: Queue(x).get()]
)
def test_what_reads_memory_gets_that_of_the_tensor(rows, take):
    lazy, _ = make(rows)

    assert take(lazy).tolist() == rows.tolist()
    assert lazy.data_ptr() == lazy.load().data_ptr()


class Queue:
    """A tensor on its way to another process."""

    def __init__(self, tensor):
        self.sent = ForkingPickler.dumps(tensor)

    def get(self):
        return ForkingPickler.loads(self.sent)


def test_a_function_of_python_is_applied(rows):
    lazy, _ = make(rows)

    assert torch.equal(lazy.apply_(lambda number: number + 1) + 0, rows + 1)
    assert find_tag(lazy, "x") is None


def test_what_was_saved_is_loaded_by_torch_alone(rows, tmp_path):
    module = torch.nn.Module()
    module.register_buffer("rows", tag(rows, "plan", 1, "x"))
    torch.save(module.state_dict(), tmp_path / "state.pt")

    loaded = torch.load(tmp_path / "state.pt", weights_only=True)["rows"]

    assert torch.equal(loaded, rows)
    assert find_tag(loaded, "x") is None


def test_copies_of_ordinary_tensors_are_not_known(rows):
    known = tag(rows, "plan", 1, "x")

    assert find_tag(known, "x") is not None
    assert find_tag(known, "edge_index") is None
    assert all(find_tag(copied, "x") is None for copied in (copy.deepcopy(known), known.clone(), known.detach()))
    assert find_tag(known.requires_grad_(), "x") is None
