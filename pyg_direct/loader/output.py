"""Samples in PyG's form, and from it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.graph.relation import LINKS, NODES
from pyg_direct.sampling.sample import Sample
from pyg_direct.sampling.subgraph import GeneralSample


def to_output(sample: Sample, input_id: Tensor | None = None) -> SamplerOutput:
    """A uniform sample in PyG's form."""
    return SamplerOutput(node=sample.n_id, row=sample.edge_index[0], col=sample.edge_index[1], edge=sample.e_id,
                         num_sampled_nodes=sample.num_sampled_nodes, num_sampled_edges=sample.num_sampled_edges,
                         metadata=(input_id, None))  # fmt: skip


def from_output(out: SamplerOutput) -> Sample:
    """A uniform sample from PyG's form, as a user's transform may have left it.

    Raises:
        ArgumentTypeError: the transform returned something else.
    """
    if not isinstance(out, SamplerOutput):
        raise ArgumentTypeError(f"transform_sampler_output must return a SamplerOutput, got {type(out).__name__}")
    node_counts = list(torch.tensor(out.num_sampled_nodes or [0]).cumsum(0).tolist())
    edge_counts = [0, *torch.tensor(out.num_sampled_edges or [], dtype=torch.int64).cumsum(0).tolist()]
    edge_index = torch.stack([out.row, out.col])
    e_id = torch.empty(0, dtype=torch.int64, device=out.node.device) if out.edge is None else out.edge
    return Sample(out.node, edge_index, e_id, node_counts, edge_counts)


def to_general_output(sample: GeneralSample, is_hetero: bool) -> SamplerOutput | HeteroSamplerOutput:
    """Any sample in PyG's form."""
    if is_hetero:
        return HeteroSamplerOutput(sample.node, sample.row, sample.col, sample.edge, sample.batch,
                                   sample.num_sampled_nodes, sample.num_sampled_edges)  # fmt: skip
    nodes, edges = sample.num_sampled_nodes, sample.num_sampled_edges
    return SamplerOutput(
        sample.node[NODES], sample.row[LINKS], sample.col[LINKS], sample.edge[LINKS],
        None if sample.batch is None else sample.batch[NODES], None if nodes is None else nodes[NODES],
        None if edges is None else edges[LINKS],
    )  # fmt: skip
