"""GE-SpMM gives the products that torch gives, of any width, of rows of any number of edges."""

import pytest
import torch

from benchmarks.dynamic.ge_spmm import TEAM, multiply_csr
from tests.poison import poisoned_memory

NODES = 20


@pytest.fixture(params=[pytest.param("cpu", id="sim", marks=pytest.mark.sim),
                        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)])  # fmt: skip
def device_of_kernels(request):
    return torch.device(request.param)


def make_matrix(degrees, device):
    """CSR of rows of these degrees, with columns at random, some of them twice."""
    indptr = torch.tensor([0, *degrees]).cumsum(0).int()
    indices = torch.randint(NODES, (int(indptr[-1]),), dtype=torch.int32)
    return indptr.to(device), indices.to(device)


def multiply(indptr, indices, x):
    """On the CPU, as cuSPARSE refuses matrices of more entries than places."""
    indptr, indices, x, values = indptr.cpu(), indices.cpu(), x.cpu(), torch.ones(indices.numel())
    return torch.sparse.mm(torch.sparse_csr_tensor(indptr, indices, values, (len(indptr) - 1, len(x))), x)


@pytest.mark.parametrize("width", [1, 2, 3, TEAM // 2, TEAM // 2 + 1, TEAM, TEAM + 3, 2 * TEAM, 4 * TEAM + 1])
@pytest.mark.parametrize("degrees", [[0, 3, 1, 0, 2 * TEAM, 5, 2], [TEAM * TEAM + 1, 1], [0]])
def test_products_are_those_of_torch(device_of_kernels, width, degrees):
    indptr, indices = make_matrix(degrees, device_of_kernels)
    # Whole numbers, so that no order of sums rounds.
    x = torch.randint(-9, 9, (NODES, width), device=device_of_kernels).float()

    with poisoned_memory():
        got = multiply_csr(indptr, indices, x)

    assert torch.equal(got.cpu(), multiply(indptr, indices, x))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 4, 8, 16, 32, 64, 100])
def test_products_of_many_rows_are_those_of_torch(width):
    degrees = torch.randint(40, (10_000,)).tolist()
    indptr, indices = make_matrix(degrees, "cuda")
    x = torch.randn(NODES, width, device="cuda")

    got, expected = multiply_csr(indptr, indices, x).cpu(), multiply(indptr, indices, x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
