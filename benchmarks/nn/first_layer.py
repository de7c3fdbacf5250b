"""First layer over raw features: rows gathered into a batch and then summed, or summed in place.

Gathered, each row of a batch is read once from its memory. In place, it is read once for each of its edges, and only
rows of targets are gathered. So the second way saves the batch's bytes in GPU memory, and adds reads over the link for
edges that share a source.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor

from pyg_direct.bench.limits import time_on_clock, time_on_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.features.feature import Feature
from pyg_direct.nn.sorted_edges import SortedEdges
from pyg_direct.ops.aggregate.sum_rows import aggregate


def measure_first_layer(x: Tensor, n_id: Tensor, edges: SortedEdges, num_targets: int, name: str) -> Iterator[Row]:
    """Measure both ways for a mean over a batch's sorted edges, with features on its device and, for a GPU, on the
    host.

    Args:
        x: Features of all nodes `[N, F]` on the CPU; they are moved to the measured memory.
        n_id: Nodes of the batch, int64 `[n]`.
        edges: The edges that the first layer sums over.
        num_targets: Nodes with sums, the first ones of the batch: all nodes except the last hop's.
    """
    on_gpu = n_id.is_cuda
    source = n_id.index_select(0, edges.row.long())
    num_rows, num_edges = n_id.numel(), source.numel()
    places: dict[str, int | str] = {"GPU": "100%", "host": 0} if on_gpu else {"CPU": 0}
    for place, share in places.items():
        feature = Feature(device_cache_size=share).from_cpu_tensor(x)
        table = feature.whole if place == "GPU" else feature.stored.tier.table if on_gpu and feature.stored else x
        assert table is not None

        def bring(feature: Feature = feature) -> tuple[Tensor, Tensor]:
            rows = feature[n_id]
            return aggregate(rows, edges.indptr, edges.row, reduce="mean", target=edges.target,
                             num_targets=num_targets, max_degree=edges.max_degree), rows[:num_targets]  # fmt: skip

        def sum_in_place(feature: Feature = feature, table: Tensor = table) -> tuple[Tensor, Tensor]:
            lying = n_id.index_select(0, edges.row.long())
            sums = aggregate(table, edges.indptr, lying, reduce="mean", target=edges.target, num_targets=num_targets,
                             max_degree=edges.max_degree)  # fmt: skip
            return sums, feature[n_id[:num_targets]]

        with torch.no_grad():
            for got, expected in zip(sum_in_place(), bring(), strict=True):
                torch.testing.assert_close(got, expected)
            case, medians = f"first layer/{name}/{place}", []
            for way, work, count in (("rows brought, then summed", bring, num_rows),
                                     ("summed where they lie", sum_in_place, num_targets + num_edges)):  # fmt: skip
                seconds = time_on_gpu(work, 10, 3, 3) if on_gpu else time_on_clock(work, 5, 1)
                medians.append(median(seconds))
                yield Row.of(case, way, "ms", [1e3 * s for s in seconds], note=f"{count} rows read")
            yield Row.of(case, "brought over in place", "x", [medians[0] / medians[1]],
                         note="above 1: summing where rows lie is faster")  # fmt: skip
            yield Row.of(case, "rows read, in place over brought", "x", [(num_targets + num_edges) / num_rows])
