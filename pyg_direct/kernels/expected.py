"""Values of rows added up over the nodes that the rows list: what a hop brings to each node."""

from __future__ import annotations

from pyg_direct.kernels.jit import cpu_kernel, prange


@cpu_kernel
def spread_values_cpu(indptr, indices, values, firsts, sums):
    """sums[p, node] += values[row] for every listing of a node by the rows from firsts[p] to firsts[p + 1].

    Rows whose value is 0 are not read. `firsts` is int64 `[P + 1]`, `sums` float32 `[P, N]`.
    """
    for p in prange(sums.shape[0]):
        for row in range(firsts[p], firsts[p + 1]):
            value = values[row]
            if value != 0:
                for e in range(indptr[row], indptr[row + 1]):
                    sums[p, indices[e]] += value
