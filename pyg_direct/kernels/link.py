"""Links as seeds of a captured graph: their ends, negatives drawn for them, and where these stand in a batch."""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.draw import draw, draw_below
from pyg_direct.kernels.jit import THREADS, body, cuda, gpu_kernel
from pyg_direct.kernels.state import HEADER, KEY, NEGATIVE_DRAW


@body
def read_end(inbox, i, num_links, more_sources, num_nodes):
    """End `i` of the links of a batch: sources, then those of negatives, then targets, then those of negatives.

    Given ends stand behind the header; others are drawn under the key of the batch, as `sampling/negative.py` does.
    """
    end = 0
    if i >= num_links + more_sources:
        i, end = i - (num_links + more_sources), 1
    if i < num_links:
        return inbox[HEADER + end * num_links + i]
    return draw_below(draw(inbox[KEY], NEGATIVE_DRAW, end), i - num_links, 0, num_nodes)


@gpu_kernel("I[] i8[] i8 i8 i8[] f4[]", I=("i4", "i8"))
def place_ends_gpu(nodes, ends, num_seeds, num_links, places, labels):
    """Where each end stands among the seeds, the first of `nodes`, ascending; labels: 1 for given links, else 0."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < places.shape[0]:
        end, low, high = ends[i], np.int64(0), num_seeds
        while low < high:
            middle = (low + high) >> 1
            if nodes[middle] < end:
                low = middle + 1
            else:
                high = middle
        places[i] = low
        if i < labels.shape[0]:
            labels[i] = np.float32(1) if i < num_links else np.float32(0)
        i += np.int64(cuda.gridDim.x) * THREADS
