"""Graphs that a program gives its layers whole, again and again: edges in any order, sorted by target once and kept.

PyG's own code makes a row for each edge, and adds the rows up. A batch is met as often as a model has layers; a graph
that is trained on whole, or evaluated after each epoch, comes back, and is worth a sort.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pyg_direct.nn import sorted as _registry
from pyg_direct.nn.sorted import Form, SortedBatch, SortedEdges, forget_dead, is_plain_tensor, is_registered
from pyg_direct.ops.check import INDEX_DTYPES
from pyg_direct.ops.launch import runs_on_gpu
from pyg_direct.ops.offsets import compress
from pyg_direct.runtime.mode import ordinary_tensors

# How often layers ask for the same edges, once or twice each, before they are sorted: more than those of a model do for
# a batch of some other loader. Where little is gained they come back in hundreds of epochs.
_OFTEN, _OFTEN_IF_SMALL = 8, 64
# Numbers in the rows of edges that PyG's code would make, from which on sums are faster without them. On two cores
# 2,700 nodes and 10,600 edges gain nothing with rows of 16 numbers, and a fifth and more with those of 64. On an H200
# the host is what takes the time of less: there a layer must bring fewer launches, which those of GCN and GAT do (of
# 34 to 20,000 nodes their steps take 1.12 to 1.42 times as long without, their inference 2.3 to 4.1), and all do
# without a gradient (SAGE 1.5 to 2.1, GIN 0.99 to 1.5; their steps 0.82 to 1.03).
_WORTH = {"cpu": 1 << 19, "gpu": 30_000_000}


class WholeGraph(SortedBatch):
    """The edges of a whole `edge_index`, those of a target in their order; what belongs to edges is in another order.

    Attributes:
        given: The edges as they were given; None on a GPU, where comparing them would be waited for.
        stream: That of the GPU on which they were sorted; 0 on a CPU.
    """

    def __init__(self, form: Form, edge_index: Tensor, num_targets: int) -> None:
        row, target = edge_index.unbind(0)
        least = int(row.max()) + 1, int(target.max()) + 1
        ordered, order = torch.sort(target, stable=True)
        indptr = compress(ordered, num_targets)
        degree = int(indptr.diff().max())
        super().__init__(form, (least[0], 0), (num_targets, 0), (edge_index.shape[1],), degree)
        self.given, self.stream = None if edge_index.is_cuda else edge_index.clone(), _stream_of(edge_index)
        self._edges = SortedEdges(indptr, row.index_select(0, order), ordered, *least, degree)

    def view(self, edge_index: Tensor) -> SortedEdges:
        """All edges, sorted."""
        return self._edges

    def fits(self, edge_index: Tensor, num_sources: int, num_targets: int) -> bool:
        """Whether the edges lie among so many nodes."""
        edges = self._edges
        return edges.least_sources <= num_sources and edges.least_targets <= num_targets < edges.indptr.numel()


def _stream_of(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


class _Met:
    """An `edge_index` that layers met so often, and its edges once they are sorted; does not keep it alive."""

    def __init__(self, form: Form) -> None:
        self.form, self.storage = form, form.storage
        self.times = 0
        self.graph: WholeGraph | None = None


_MET: dict[tuple[int, int], _Met] = {}


class UnknownEdges:
    """The edges that a layer met last, if `may_find` knows nothing of them; does not keep them alive.

    A training step on a small graph takes PyG's code. It is Python that takes the time there, and so would looking at
    the same edges again, in each layer twice.
    """

    __slots__ = ("_count", "_edges")

    def __init__(self) -> None:
        self._edges: Callable[[], Any] = _nothing
        self._count = -1

    def __deepcopy__(self, memo: Any) -> UnknownEdges:
        # A copy of a layer has met nothing.
        return UnknownEdges()

    def are(self, edge_index: Any) -> bool:
        """Whether these are they, nothing was told of any edges since, and gradients are asked for as then."""
        return self._edges() is edge_index and self._count == _registry.told and torch.is_grad_enabled()

    def note(self, edge_index: Any) -> None:
        """Keep what was found of edges for layers with gradients."""
        if is_plain_tensor(edge_index) and torch.is_grad_enabled():
            self._edges, self._count = weakref.ref(edge_index), _registry.told


def _nothing() -> Any:
    """No edges, which are not None."""
    return _nothing


def may_find(edge_index: Any, x: Any, width: int = 0, *, saves_launches: bool = False) -> bool:
    """Whether `find_batch` or `find_whole` may know these edges.

    A layer of a small graph takes as long as its launches do, and is looked at no further where its edges cannot be
    known.

    Args:
        edge_index: What a layer was given.
        x: Its rows, or a pair of them.
        width: Numbers of a row for `find_whole`, if not those of `x`.
        saves_launches: See `find_whole`.
    """
    if not is_plain_tensor(edge_index):
        return False
    if is_registered(edge_index) or _gains_at_any_size(edge_index, saves_launches):
        return True
    if width == 0:
        rows = x[0] if isinstance(x, (tuple, list)) else x
        width = rows.shape[-1] if isinstance(rows, Tensor) and rows.dim() else 0
    return _is_large(edge_index, width)


def _gains_at_any_size(edge_index: Tensor, saves_launches: bool) -> bool:
    """Whether the host of a GPU has less to launch, as in any layer without a gradient."""
    return runs_on_gpu(edge_index) and (saves_launches or not torch.is_grad_enabled())


def _is_large(edge_index: Tensor, width: int) -> bool:
    return edge_index.numel() * width >= 2 * _WORTH["gpu" if runs_on_gpu(edge_index) else "cpu"]


def find_whole(edge_index: Tensor, num_targets: int, width: int, *, saves_launches: bool = False) -> WholeGraph | None:
    """The sorted edges of a graph that layers met often; None for any other.

    Only for what brings nothing that belongs to edges, such as their weights. On a GPU the host waits once, when they
    are sorted, and they serve the stream that this was done on; a captured graph would outlive them, and gets none.
    There writes that torch does not count, as through `edge_index.data` or DLPack, are not seen.

    Args:
        edge_index: (source, target), `[2, E]` in any order.
        num_targets: Nodes that edges may lead to.
        width: Numbers of a row.
        saves_launches: Whether a step of the layer takes fewer launches than PyG's.
    """
    if (
        type(edge_index) is not Tensor
        or edge_index.layout != torch.strided
        or edge_index.dim() != 2
        or edge_index.shape[0] != 2
        or edge_index.dtype not in INDEX_DTYPES
        or edge_index.is_inference()
        or (edge_index.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return None
    is_large = _is_large(edge_index, width)
    if not is_large and not _gains_at_any_size(edge_index, saves_launches):
        return None
    storage = edge_index.untyped_storage()
    place, version = (storage._cdata, int(edge_index.storage_offset())), edge_index._version
    met = _MET.get(place)
    if met is None or met.form[1:] != (version, edge_index.stride(), edge_index.dtype, edge_index.shape):
        form = Form(StorageWeakRef(storage), version, edge_index.stride(), edge_index.dtype, edge_index.shape)
        forget_dead(_MET)
        met = _MET[place] = _Met(form)
    met.times += 1
    if met.times <= (_OFTEN if is_large else _OFTEN_IF_SMALL):
        return None
    # NumPy writes to the same memory leave no trace, so the edges are compared: a fraction of what rows take.
    if met.graph is not None and met.graph.given is not None and not torch.equal(met.graph.given, edge_index):
        met.graph, met.times = None, 1
        return None
    if met.graph is not None and met.graph.stream != _stream_of(edge_index):
        return None
    if met.graph is None or not met.graph.fits(edge_index, met.graph.view(edge_index).least_sources, num_targets):
        met.graph = _sort(met.form, edge_index, num_targets)
        met.times = 0 if met.graph is None else met.times
    return met.graph


@ordinary_tensors()
def _sort(form: Form, edge_index: Tensor, num_targets: int) -> WholeGraph | None:
    """The edges of a graph; None where they do not lead to so many nodes, which PyG refuses in its own words."""
    if edge_index.numel() == 0:
        return None
    least, most = torch.aminmax(edge_index, dim=1)
    return WholeGraph(form, edge_index, num_targets) if int(least.min()) >= 0 and int(most[1]) < num_targets else None
