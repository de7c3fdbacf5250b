"""Sums over the edges of each target of rows times their weights by a softmax, in plain NumPy."""

from tests.reference.aggregate import aggregate
from tests.reference.softmax import softmax


def attend(x, source, target, edge, indptr, row, slope=1.0, loops=False):
    """(sums `[T, F]`, weights `[E, H]`) in float64."""
    alpha = softmax(source, target, edge, indptr, row, slope, loops)
    return aggregate(x, indptr, row, "sum", alpha), alpha
