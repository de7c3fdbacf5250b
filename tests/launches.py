"""Kernels that a call runs."""

from contextlib import contextmanager

from pyg_direct.ops.aggregate import compute_softmax, operators

_MODULES = (operators, compute_softmax)
# Of attention that is not one launch: the softmax, and the sum. On a CPU the softmax is three loops.
TWO_LAUNCHES = {
    "gpu": ["softmax_edges_gpu", "sum_rows_gpu"],
    "cpu": ["add_scores_cpu", "shift_scores_cpu", "divide_shares_cpu", "sum_rows_cpu"],
}


def of_attention(names):
    """Return those of `names` that weigh or add up rows, of any width; a few more cut long rows of edges."""
    return [name.replace("_wide", "") for name in names if "slices" not in name]


@contextmanager
def counted_launches():
    """Names of the grids and loops of attention that are run inside, in their order."""
    names, before = [], []

    def count(run):
        def counted(kernel, *args, **kwargs):
            names.append(getattr(kernel, "name", None) or kernel.__name__)
            return run(kernel, *args, **kwargs)

        return counted

    for module in _MODULES:
        for name in ("run_gpu", "run_cpu"):
            if hasattr(module, name):
                before.append((module, name, getattr(module, name)))
                setattr(module, name, count(getattr(module, name)))
    try:
        yield names
    finally:
        for module, name, run in before:
            setattr(module, name, run)
