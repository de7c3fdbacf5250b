"""Rows are written in place, and read again from there."""

import pytest
import torch
import torch.nn.functional as F

from pyg_direct import Feature, save_rows
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from tests.features.contract import DTYPES, bytes_of, make_rows

CACHES = pytest.mark.parametrize("cache", [0, "20%", "100%"])


@CACHES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_written_rows_are_read_again(device, dtype, cache):
    table, rows = make_rows(dtype=dtype), make_rows(4, dtype=dtype)
    expected = bytes_of(table).clone()
    expected[[7, 0, 39]] = bytes_of(rows)[[2, 1, 3]]
    feature = Feature(device=device, device_cache_size=cache).from_cpu_tensor(table)

    got = feature.update_(torch.tensor([7, 0, 7, 39], device=device), rows.to(device))

    assert got is feature
    assert torch.equal(bytes_of(feature[torch.arange(40, device=device)]), expected)
    if device.type == "cpu" or cache != "100%":
        feature.synchronize()
        assert torch.equal(bytes_of(table), expected)


@CACHES
def test_ids_and_rows_may_come_from_the_host(device, cache):
    feature = Feature(device=device, device_cache_size=cache).from_cpu_tensor(torch.zeros(40, 3))

    feature.update_([1, 30], torch.ones(2, 3))

    assert feature[[0, 1, 30]].cpu().tolist() == [[0] * 3, [1] * 3, [1] * 3]


def test_no_rows_change_nothing(device):
    feature = Feature(device=device, device_cache_size="20%").from_cpu_tensor(torch.zeros(40, 3))

    feature.update_(torch.empty(0, dtype=torch.int64), torch.empty(0, 3))
    feature.update_([], torch.empty(0, 3))

    assert feature[[0, 39]].sum() == 0


def test_rows_without_columns_may_be_named_twice(device):
    feature = Feature(device=device).from_cpu_tensor(torch.zeros(40, 0))

    feature.update_([3, 3, 5], torch.zeros(3, 0))

    assert feature[[3, 5]].shape == (2, 0)


@CACHES
@pytest.mark.parametrize("store_dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_rows_in_fewer_bits_are_rounded(device, cache, store_dtype):
    rows = torch.randn(3, 5)
    feature = Feature(device=device, device_cache_size=cache, store_dtype=store_dtype).from_cpu_tensor(
        torch.ones(40, 5)
    )
    expected = Feature(device="cpu", store_dtype=store_dtype).from_cpu_tensor(rows.clone())[[0, 1, 2]]

    feature.update_([39, 2, 20], rows)

    assert torch.equal(feature[[39, 2, 20]].cpu(), expected)
    assert feature[[1, 38]].cpu().tolist() == [[1] * 5] * 2


def test_a_local_order_names_the_rows(device):
    feature = Feature(device=device).from_cpu_tensor(torch.zeros(3, 1))
    feature.set_local_order(torch.tensor([2, 0, 1]))

    feature.update_([0, 2], torch.tensor([[5.0], [7.0]]))

    assert feature[[0, 1, 2]].view(-1).tolist() == [5, 0, 7]


@CACHES
def test_embeddings_are_trained_as_by_sparse_adam(device, cache):
    num_nodes, lr, betas, eps = 30, 0.1, (0.9, 0.999), 1e-8
    start, target = torch.randn(num_nodes, 4), torch.randn(num_nodes, 4, device=device)
    theirs = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(list(theirs.parameters()), lr=lr, betas=betas, eps=eps)
    options = {"device": device, "device_cache_size": cache}
    weight = Feature(**options).from_cpu_tensor(start.clone())
    means, squares = (Feature(**options).from_cpu_tensor(torch.zeros(num_nodes, 4)) for _ in range(2))
    ids_of_steps = [torch.randperm(num_nodes, device=device)[:8] for _ in range(6)]

    for step, ids in enumerate(ids_of_steps, 1):
        optimizer.zero_grad()
        F.mse_loss(theirs(ids), target[ids]).backward()
        optimizer.step()
        rows = weight[ids].requires_grad_()
        F.mse_loss(rows, target[ids]).backward()
        mean = betas[0] * means[ids] + (1 - betas[0]) * rows.grad
        square = betas[1] * squares[ids] + (1 - betas[1]) * rows.grad**2
        rate = lr * (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)
        means.update_(ids, mean)
        squares.update_(ids, square)
        weight.update_(ids, rows.detach() - rate * mean / (square.sqrt() + eps))

    torch.testing.assert_close(weight[torch.arange(num_nodes)], theirs.weight.detach())


@CACHES
def test_an_id_out_of_range_writes_nothing(device, cache):
    feature = Feature(device=device, device_cache_size=cache).from_cpu_tensor(torch.zeros(40, 3))

    def update_and_wait():
        feature.update_(torch.tensor([3, 40], device=device), torch.ones(2, 3, device=device))
        feature.synchronize()

    with pytest.raises(IdError, match=r"must lie in \[0, 40\)"):
        update_and_wait()
    assert feature[torch.arange(40)].sum() == (0 if device.type == "cpu" else 3)


@pytest.mark.parametrize(("ids", "rows", "error", "words"), [
    ([1], torch.ones(1, 4), ArgumentError, r"rows must be \(1, 3\) of torch.float32, got \(1, 4\)"),
    ([1], torch.ones(1, 3).double(), ArgumentError, "got .* of torch.float64"),
    ([1, 2], torch.ones(1, 3), ArgumentError, r"rows must be \(2, 3\)"),
    ([1], [[1.0] * 3], ArgumentTypeError, "rows must be a tensor, got list"),
    ([0.5], torch.ones(1, 3), ArgumentTypeError, "ids must have dtype"),
    ([40], torch.ones(1, 3), IdError, r"ids must lie in \[0, 40\), got 40"),
])  # fmt: skip
def test_other_rows_are_refused(device, ids, rows, error, words):
    feature = Feature(device=device).from_cpu_tensor(torch.zeros(40, 3))

    with pytest.raises(error, match=words):
        feature.update_(ids, rows)


def test_rows_in_a_file_are_read_only(device, tmp_path):
    feature = Feature(device=device).from_file(save_rows(tmp_path / "rows.npy", make_rows()))

    with pytest.raises(ArgumentError, match="cannot be updated: the file is read-only"):
        feature.update_([1], torch.ones(1, 5))
