"""What a general sampler returned, on its way through a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct.loader.output import PackedOutput

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
