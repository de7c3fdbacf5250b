"""Scores of attention that are found before the matrix."""

import pytest
import torch

from pyg_direct.nn.attention import _Scores


@pytest.mark.parametrize("num_targets", [0, 2, 5])
def test_scores_are_those_of_rows_behind_their_matrix(num_targets):
    rows, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (4, 3)))
    to_source, to_target = (torch.randn(1, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    source, target = _Scores.apply(rows, weight, to_source, to_target, num_targets)

    made = rows @ weight.t()
    torch.testing.assert_close(source, made @ to_source.view(4, 1))
    torch.testing.assert_close(target, made[:num_targets] @ to_target.view(4, 1))


def test_gradcheck():
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True)
             for shape in ((5, 3), (4, 3), (1, 1, 4), (1, 1, 4))]  # fmt: skip

    def compute(*args):
        return _Scores.apply(*args, 2)

    assert torch.autograd.gradcheck(compute, given)
    assert torch.autograd.gradgradcheck(compute, given)
