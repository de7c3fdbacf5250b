"""Products and scores of a layer in one function: those of separate products, and their gradients."""

import pytest
import torch

from pyg_direct.nn import linear
from pyg_direct.nn.hetero import projection
from pyg_direct.nn.hetero.joined_edges import Relation
from pyg_direct.nn.hetero.projection import cast_all, project

HEADS, CHANNELS = 2, 3
SIZES = [4, 7, 3, 5]


class Case:
    """Four relations: two tables of sources, two of targets, one of them both; widths may differ."""

    def __init__(self, device, widths=(5, 5, 5), dtype=torch.float64):
        draw = torch.Generator().manual_seed(0)

        def make(*shape):
            return torch.randn(shape, generator=draw, dtype=dtype).to(device)

        tables = [make(count, width) for count, width in zip((9, 8, 6), widths, strict=True)]
        self.ends = [(0, 1), (1, 0), (0, 2), (0, 0)]
        self.picked = [None, torch.tensor([6, 0, 2], device=device), torch.tensor([8, 1], device=device), None]
        width = HEADS * CHANNELS
        weights = [make(width, tables[source].shape[1]) for source, _ in self.ends]
        own = [make(width, tables[target].shape[1]) for _, target in self.ends]
        vectors = [make(1, HEADS, CHANNELS) for _ in self.ends]
        self.leaves = [part.requires_grad_() for part in (*tables, *weights, *own, *vectors)]
        counts = [9, 3, 2, 9]
        self.pull = make(sum(counts), width), make(sum(SIZES), HEADS)

    def split(self):
        return self.leaves[:3], *(self.leaves[begin : begin + 4] for begin in (3, 7, 11))

    def project(self, used):
        tables, weights, own, vectors = self.split()
        relations = [Relation(None, None, None, tables[a], tables[b]) for a, b in self.ends]
        return project(relations, weights, own, vectors, self.picked, SIZES, used, tables[0].dtype)

    def compose(self, used):
        tables, weights, own, vectors = self.split()
        made, scores = [], []
        for (a, b), i in zip(self.ends, range(4), strict=True):
            rows = tables[a] if self.picked[i] is None else tables[a][self.picked[i]]
            targets = (tables[b][: SIZES[i]] @ own[i].t()).view(-1, HEADS, CHANNELS)
            both = [rows @ weights[i].t(), (targets * vectors[i]).sum(-1)]
            made, scores = made + both[:1], scores + both[1:]
        if not all(used):
            made, scores = ([part if ok else part.detach() for part, ok in zip(parts, used, strict=True)]
                            for parts in (made, scores))  # fmt: skip
        return torch.cat(made), torch.cat(scores)

    def differentiate(self, outs):
        return torch.autograd.grad(outs, self.leaves, self.pull, allow_unused=True)


@pytest.mark.parametrize("widths", [(5, 5, 5), (5, 4, 6)])
@pytest.mark.parametrize("used", [[True] * 4, [True, False, True, False], [False, True, False, False]])
def test_equals_separate_products(real_device, widths, used):
    case = Case(real_device, widths)
    expected = case.compose(used)

    got = case.project(list(used))

    for one, other in zip([*got, *case.differentiate(got)], [*expected, *case.differentiate(expected)], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_has_gradients_of_gradients(real_device):
    case = Case(real_device)
    found = []

    for make in (case.compose, case.project):
        first = torch.autograd.grad(make([True] * 4), case.leaves, case.pull, create_graph=True)
        total = sum(part.square().sum() for part in first)
        found.append(torch.autograd.grad(total, case.leaves))

    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_gradients_of_rows_of_16_bits_are_added_up_in_fp32(real_device):
    exact, case = Case(real_device), Case(real_device, dtype=torch.float32)
    case.leaves = [part.detach().to(torch.bfloat16).requires_grad_() for part in case.leaves]
    exact.leaves = [part.detach().double().requires_grad_() for part in case.leaves]
    case.pull = tuple(part.to(torch.bfloat16) for part in case.pull)
    exact.pull = tuple(part.double() for part in case.pull)

    made, found = ([part.double() for part in one.differentiate(one.project([True] * 4))] for one in (exact, case))

    for one, other in zip(found, made, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2 * float(other.abs().max()))


@pytest.fixture
def parts(monkeypatch):
    """Multiply rows by two parts of matrices on a CPU too, as a GPU does; returns the shapes of the products."""
    made = []

    def multiply_widely(rows, matrix, out=None):
        product = rows.float() @ matrix.float()
        made.append(tuple(product.shape))
        return product if out is None else out.copy_(product)

    for module in (linear, projection):
        monkeypatch.setattr(module, "splits", lambda rows, dtype: rows.dtype == torch.bfloat16 != dtype)
        monkeypatch.setattr(module, "multiply_widely", multiply_widely)
    return made


@pytest.mark.parametrize("sizes", [SIZES, [4, 7, 0, 5]], ids=["targets", "a relation without targets"])
def test_scores_of_16_bits_by_matrices_in_two_parts_are_near_those_of_fp32(monkeypatch, parts, sizes):
    monkeypatch.setattr("tests.nn.hetero.test_projection.SIZES", sizes)
    exact, case = Case("cpu"), Case("cpu", dtype=torch.float32)
    case.leaves[:3] = [part.detach().to(torch.bfloat16).requires_grad_() for part in case.leaves[:3]]
    exact.leaves = [part.detach().double().requires_grad_() for part in case.leaves]
    exact.pull = tuple(part.double() for part in case.pull)
    expected = exact.compose([True] * 4)

    got = case.project([True] * 4)

    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-4, atol=1e-4)
    # Relations into one table take one product.
    assert {shape[0] for shape in parts} == {max(sizes[1], sizes[3]), sizes[0], sizes[2]}
    grads = torch.autograd.grad(got[1], case.leaves, case.pull[1], allow_unused=True)
    wanted = torch.autograd.grad(expected[1], exact.leaves, exact.pull[1], allow_unused=True)
    for one, other in zip(grads[7:], wanted[7:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


def test_matrices_are_cast_together(real_device):
    given = [torch.randn(3, 4, device=real_device), torch.randn(2, 5, device=real_device)]

    narrow = cast_all(given, torch.bfloat16)

    assert all(torch.equal(one, other.bfloat16()) for one, other in zip(narrow, given, strict=True))
    assert cast_all(narrow, torch.bfloat16)[0] is narrow[0]
