"""Samples in PyG's form, and back: `to_output`, `to_general_output`.

`Drawn` is the output of a general sampler on its way through a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.graph.relation import LINKS, NODES, EdgeType
from pyg_direct.sampling.hetero_plan import GeneralSample
from pyg_direct.sampling.sampling_options import Sample


def to_output(sample: Sample, input_id: Tensor | None = None) -> SamplerOutput:
    """A uniform sample in PyG's form."""
    out = SamplerOutput(node=sample.n_id, row=sample.edge_index[0], col=sample.edge_index[1], edge=sample.e_id,
                        num_sampled_nodes=sample.num_sampled_nodes, num_sampled_edges=sample.num_sampled_edges,
                        metadata=(input_id, None))  # fmt: skip
    out.max_degree = sample.max_degree
    return out


def check_output(out: Any) -> SamplerOutput:
    """A uniform sample in PyG's form, as a user's transform has left it.

    Raises:
        ArgumentTypeError: the transform returned something else.
    """
    if not isinstance(out, SamplerOutput):
        raise ArgumentTypeError(f"transform_sampler_output must return a SamplerOutput, got {type(out).__name__}")
    return out


class PackedOutput(HeteroSamplerOutput):  # type: ignore[misc]
    """A `GeneralSample` in PyG's form, whose `row` and `col` are made when they are asked for."""

    def __init__(self, sample: GeneralSample) -> None:
        self._sample: GeneralSample = sample
        self._ends: tuple[Any, Any] | None = None
        self.max_degree = sample.max_degree
        super().__init__(sample.node, None, None, sample.edge, sample.batch, sample.num_sampled_nodes,
                         sample.num_sampled_edges)  # fmt: skip

    def __reduce__(self) -> Any:
        # PyG's, where it is saved or sent: there are all its tensors, and nothing waits to be made.
        more = {name: value for name, value in self.__dict__.items() if name not in ("_sample", "_ends")}
        return HeteroSamplerOutput, (self.node, self.row, self.col, self.edge), more

    def __copy__(self) -> PackedOutput:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    @property
    def packed(self) -> GeneralSample | None:
        """The sample, if its types share memory, and as long as nobody asked for the ends of its edges, who may have
        changed them."""
        return self._sample if self._ends is None and self._sample.memory else None

    def _open(self) -> tuple[Any, Any]:
        if self._ends is None:
            self._ends = self._sample.row, self._sample.col
        return self._ends

    @property
    def row(self) -> dict[EdgeType, Tensor]:
        """Local ids of sources, int64 `[E']` by relation."""
        return self._open()[0]  # type: ignore[no-any-return]

    @row.setter
    def row(self, row: Any) -> None:
        if row is not None:
            self._ends = row, self._open()[1]

    @property
    def col(self) -> dict[EdgeType, Tensor]:
        """Local ids of targets, int64 `[E']` by relation."""
        return self._open()[1]  # type: ignore[no-any-return]

    @col.setter
    def col(self, col: Any) -> None:
        if col is not None:
            self._ends = self._open()[0], col


def to_general_output(sample: GeneralSample, is_hetero: bool) -> SamplerOutput | HeteroSamplerOutput:
    """Any sample in PyG's form."""
    if is_hetero:
        return PackedOutput(sample)
    nodes, edges = sample.num_sampled_nodes, sample.num_sampled_edges
    out = SamplerOutput(
        sample.node[NODES], *sample.edge_index[LINKS].unbind(), sample.edge[LINKS],
        None if sample.batch is None else sample.batch[NODES], None if nodes is None else nodes[NODES],
        None if edges is None else edges[LINKS],
    )  # fmt: skip
    # Of a graph in parts, rows of edges are with one of their ends.
    out.sampled, out.max_degree = sample.sampled, sample.max_degree
    return out


Output: TypeAlias = SamplerOutput | HeteroSamplerOutput


class Drawn:
    """A sampler's output, as a pipeline hands it on."""

    def __init__(self, out: Output) -> None:
        self.out = out

    def finish(self) -> Drawn:
        """Nothing is left to wait for."""
        return self

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch's allocator that the sample is read on `stream` too."""
        for value in self.tensors():
            if value.is_cuda:
                value.record_stream(stream)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that it is made of, or whose memory it is."""
        out = self.out
        packed = out.packed if isinstance(out, PackedOutput) else None
        if packed is None:
            own: tuple[Any, ...] = (out.node, out.row, out.col, out.edge, out.batch)
        else:
            own = (*packed.memory, None if out.batch is packed.batch else out.batch)
        for part in (*own, *(out.metadata or ())):
            for value in part.values() if isinstance(part, Mapping) else (part,):
                if isinstance(value, Tensor):
                    yield value
