"""Prefetched tensors are as they were, and the addresses of objects tell them apart."""

import numpy as np
import pytest
import torch

from pyg_direct.ops.rows import prefetch_objects
from pyg_direct.ops.rows.prefetch_objects import prefetch_tensors, read_addresses


def pack(values):
    return np.fromiter(values, object, len(values))


def make_tensors():
    rows = torch.rand(8, 2)
    return [torch.rand(3), rows, rows[2:4], torch.empty(0), torch.nn.Parameter(torch.rand(2)), torch.tensor(1),
            torch.eye(3).to_sparse()]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 7])
def test_tensors_of_all_kinds_are_only_read(count):
    tensors = make_tensors()[:count]
    before = [(tensor.detach().to_dense().tolist(), tensor._version) for tensor in tensors]

    prefetch_tensors(pack(tensors))

    assert [(tensor.detach().to_dense().tolist(), tensor._version) for tensor in tensors] == before


def test_the_memory_of_a_tensor_is_found_on_this_python():
    offset = prefetch_objects._find_offset()

    assert offset is not None
    assert 0 < offset < torch.Tensor.__basicsize__


def test_without_a_known_place_nothing_is_read(monkeypatch):
    monkeypatch.setattr(prefetch_objects, "_find_offset", lambda: None)
    monkeypatch.setattr(prefetch_objects, "prefetch_objects_cpu", None)

    prefetch_tensors(pack(make_tensors()))


def test_addresses_are_of_the_objects():
    first, second = torch.ones(1), torch.ones(1)

    addresses = read_addresses(pack([first, second, first])).tolist()

    assert addresses == [id(first), id(second), id(first)]
    assert read_addresses(pack([])).tolist() == []
