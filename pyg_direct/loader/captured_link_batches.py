"""Uniform batches around links of a graph without types, drawn and placed by the captured graph of a plan."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling

from pyg_direct.loader.collate.data import Attributes
from pyg_direct.nn.sorted_edges import register_hops
from pyg_direct.ops.rows.upload import upload
from pyg_direct.sampler.link_seeds import draws_itself
from pyg_direct.sampler.neighbor_sampler import NeighborSampler
from pyg_direct.sampling.captured_plan import Pending
from pyg_direct.sampling.link_endpoints import Ends
from pyg_direct.sampling.negative_links import MAX_NODES
from pyg_direct.sampling.sampling_options import Sample
from pyg_direct.sampling.uniform_gpu import GpuPlan


class PlannedLinks:
    """Maker of batches around links by a plan on a GPU, equal to the step-by-step result of `Links`.

    Args:
        sampler: The sampler.
        given: All links of the loader.
        negatives: Options of negatives.
    """

    def __init__(self, sampler: NeighborSampler, given: EdgeSamplerInput, negatives: NegativeSampling | None) -> None:
        self._sampler, self._given, self._negatives = sampler, given, negatives

    def find_plan(self) -> GpuPlan | None:
        """Find the plan that draws and places all links; None if links are strict, weighted, timed or excluded."""
        sampler, negatives, nodes = self._sampler, self._negatives, self._sampler.num_nodes
        if (self._given.time is not None or sampler.exclude_target_edges or not sampler._is_plain()
                or not isinstance(nodes, int) or not 0 < nodes < MAX_NODES):  # fmt: skip
            return None
        if negatives is not None and (sampler.strict_negatives or negatives.src_weight is not None
                                      or negatives.dst_weight is not None or draws_itself(negatives)):  # fmt: skip
            return None
        plan = sampler._open_plan(unique_seeds=True)
        return plan if isinstance(plan, GpuPlan) else None

    def submit(self, plan: GpuPlan, positions: Tensor, ends: Tensor, key: int) -> Pending:
        """Start to sample around links.

        Args:
            plan: Result of `find_plan`.
            positions: Positions of the links among all, int64 `[L]`.
            ends: Their sources and targets, int64 `[L, 2]`, or their sources alone, `[L]`.
            key: Key of the batch.
        """
        negatives, more_sources, more_targets = self._negatives, 0, 0
        if negatives is not None:
            more_targets = math.ceil(positions.shape[0] * negatives.amount)
            more_sources = more_targets if negatives.is_binary() else 0
        has_labels = more_sources > 0 and self._given.label is None
        # Not by indexing, which wakes torch's threads for a few thousand items.
        sources, targets = ends.unbind(1) if ends.dim() == 2 else (ends, self._given.col.index_select(0, positions))
        return plan.submit(Ends(sources, targets, more_sources, more_targets, has_labels), key)

    def build(self, attributes: Attributes, data: Any, sample: Sample, positions: Tensor, memory: list[Any]) -> Any:
        """Build the batch; `memory` as in `Attributes.build`."""
        given, negatives, ends = self._given, self._negatives, sample.ends
        assert ends is not None
        input_id = positions if given.input_id is None else given.input_id.index_select(0, positions)
        batch = attributes.build(data, sample, input_id, memory=memory, counts_seeds=False)
        store, places, count = batch._store._mapping, ends.places, positions.shape[0]
        values: dict[str, Tensor | None] = {}
        if negatives is None or negatives.is_binary():
            values["edge_label_index"] = places.view(2, -1)
            values["edge_label"] = last = self._find_labels(positions, ends.labels, places.shape[0] // 2)
        else:
            amount = places.shape[0] // count - 2
            last = places[2 * count :].view(amount, count).t().contiguous().squeeze(-1)
            values.update(src_index=places[:count], dst_pos_index=places[count : 2 * count], dst_neg_index=last,
                          seed_time=None, edge_label_index=None)  # fmt: skip
        values["edge_label_time"] = None
        if memory and last is not None:
            memory.append(last)
        for name, value in values.items():
            if value is None:
                # PyG writes None for missing values.
                store.pop(name, None)
            else:
                store[name] = value
        register_hops(batch, store["num_sampled_nodes"], store["num_sampled_edges"], sample.max_degree)
        return batch

    def _find_labels(self, positions: Tensor, drawn: Tensor, num_pairs: int) -> Tensor | None:
        """Build the labels of links and of negatives, `[num_pairs, ...]`; None without labels."""
        if self._given.label is None:
            return drawn if drawn.numel() else None
        label = upload(self._given.label[positions], drawn.device)
        count = num_pairs - positions.shape[0]
        return torch.cat([label, label.new_zeros((count, *label.shape[1:]))]) if count else label
