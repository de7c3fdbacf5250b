"""Registry of graphs that a program gives its layers whole, again and again, with edges in any order.

Their edges are sorted by target once and kept (`find_whole`). PyG's own code makes a row for each edge and adds the
rows up. A batch is seen as often as a model has layers. A graph comes back if it is trained on whole, or evaluated
after each epoch. That is worth a sort.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from pyg_direct.nn import sorted_edges
from pyg_direct.nn.sorted_edges import (
    Form,
    SortedBatch,
    SortedEdges,
    forget_dead,
    is_capturing,
    is_plain_tensor,
    is_registered,
    read_form,
)
from pyg_direct.ops.argument_checks import INDEX_DTYPES
from pyg_direct.ops.local_ids.build_csr import compress_ids
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.runtime.host.tensor_views import ordinary_tensors

# Number of requests for the same edges by layers, once or twice each, before they are sorted. It exceeds the requests
# of one model for a batch of some other loader. If the gain is small, they must come back in hundreds of epochs.
_OFTEN, _OFTEN_IF_SMALL = 8, 64
# Numbers in a row, below which loops of a CPU gain nothing.
_NARROW = 8
# Numbers in the rows of edges of PyG's code, from which on sums are faster without them. On two cores 2,700 nodes and
# 10,600 edges gain nothing with rows of 16 numbers, and a fifth and more with 64. On an H200 the host limits smaller
# graphs, so a layer must need fewer launches. Without this, layers of 34 to 20,000 nodes take as many times as long:
# - GCN and GAT: steps 1.12 to 1.42, inference 2.3 to 4.1.
# - SAGE: inference 1.5 to 2.1; GIN: inference 0.99 to 1.5; their steps 0.82 to 1.03.
_WORTH = {"cpu": 1 << 19, "gpu": 30_000_000}


class WholeGraph(SortedBatch):
    """Edges of a whole `edge_index`, sorted by target in a stable order; attributes of edges keep their old order.

    Attributes:
        given: The edges as they were given; None on a GPU, for which a comparison would wait.
        order: Positions of the sorted edges in the given ones, `[E]`.
        stream: Stream of the GPU on which they were sorted; 0 on a CPU.
    """

    def __init__(self, form: Form, edge_index: Tensor, num_targets: int) -> None:
        row, target = edge_index.unbind(0)
        least = int(row.max()) + 1, int(target.max()) + 1
        ordered, order = torch.sort(target, stable=True)
        indptr = compress_ids(ordered, num_targets)
        degree = int(indptr.diff().max())
        super().__init__(form, (least[0], 0), (num_targets, 0), (edge_index.shape[1],), degree)
        self.given, self.stream = None if edge_index.is_cuda else edge_index.clone(), _stream_of(edge_index)
        self.order = order
        self._edges = SortedEdges(indptr, row.index_select(0, order), ordered, *least, degree)

    def view(self, edge_index: Tensor) -> SortedEdges:
        """Return all edges, sorted."""
        return self._edges

    def list_tensors(self) -> list[Tensor]:
        """List the tensors of the edges and of what is remembered for them."""
        leaves = tree_leaves(([*self._edges], self.order, self._indptr, list(self._made.values())))
        return [part for part in leaves if isinstance(part, Tensor)]

    def fits(self, edge_index: Tensor, num_sources: int, num_targets: int) -> bool:
        """Report whether the edges lie among so many nodes."""
        edges = self._edges
        return edges.least_sources <= num_sources and edges.least_targets <= num_targets < edges.indptr.numel()


def _stream_of(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


class _Met:
    """An `edge_index` with its count of requests by layers, and its edges once they are sorted; does not keep it
    alive.
    """

    def __init__(self, form: Form) -> None:
        self.form, self.storage = form, form.storage
        self.times = 0
        self.graph: WholeGraph | None = None
        # True if a loader keeps it for all of its batches.
        self.is_static = False


_MET: dict[tuple[int, int], _Met] = {}


class UnknownEdges:
    """Edges of a layer's last call, if `may_find` does not know them; does not keep them alive.

    A training step on a small graph takes PyG's code. Python takes the time there, and so would two checks of the same
    edges in each layer.
    """

    __slots__ = ("_count", "_edges")

    def __init__(self) -> None:
        self._edges: Callable[[], Any] = _nothing
        self._count = -1

    def __deepcopy__(self, memo: Any) -> UnknownEdges:
        # A copy of a layer has no last call.
        return UnknownEdges()

    def are(self, edge_index: Any) -> bool:
        """Report whether these are the same edges, without a registration since, and with the same need of
        gradients.
        """
        return (
            _keeper is None
            and self._edges() is edge_index
            and self._count == sorted_edges.told
            and torch.is_grad_enabled()
        )

    def note(self, edge_index: Any) -> None:
        """Keep the result for edges, for layers with gradients."""
        if is_plain_tensor(edge_index) and torch.is_grad_enabled():
            self._edges, self._count = weakref.ref(edge_index), sorted_edges.told


def _nothing() -> Any:
    """Return no edges, which are not None."""
    return _nothing


def may_find(edge_index: Any, x: Any, width: int = 0, *, saves_launches: bool = False) -> bool:
    """Report whether `find_batch` or `find_whole` may know these edges.

    A layer of a small graph takes as long as its launches do. If its edges cannot be known, no further check is made.

    Args:
        x: Its rows, or a pair of them.
        width: Numbers of a row for `find_whole`, if they differ from `x`.
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


def wins_on_cpu(rows: Tensor) -> bool:
    """Report whether the loops of a CPU are faster than torch's, which they are not for narrow rows."""
    return rows.shape[1:].numel() >= _NARROW


def _gains_at_any_size(edge_index: Tensor, saves_launches: bool) -> bool:
    """Report whether the host of a GPU has fewer launches, as in any layer without a gradient."""
    return _keeper is not None or (runs_on_gpu(edge_index) and (saves_launches or not torch.is_grad_enabled()))


def _is_large(edge_index: Tensor, width: int) -> bool:
    return edge_index.numel() * width >= 2 * _WORTH["gpu" if runs_on_gpu(edge_index) else "cpu"]


def find_whole(edge_index: Tensor, num_targets: int, width: int, *, saves_launches: bool = False) -> WholeGraph | None:
    """Return the sorted edges of a graph that layers met often; None for any other.

    Only for layers without attributes of edges, such as weights. On a GPU the host waits once, for the sort, and the
    sorted edges serve the stream of the sort. A captured graph would outlive them, and gets none. On a GPU, writes that
    torch does not count, as through `edge_index.data` or DLPack, are not seen.

    Args:
        edge_index: (source, target), `[2, E]` in any order.
        saves_launches: True if a step of the layer takes fewer launches than PyG's.
    """
    if (
        type(edge_index) is not Tensor
        or edge_index.layout != torch.strided
        or edge_index.dim() != 2
        or edge_index.shape[0] != 2
        or edge_index.dtype not in INDEX_DTYPES
        or edge_index.is_inference()
    ):
        return None
    if _keeper is not None:
        return _keeper.find(edge_index, num_targets)
    if edge_index.is_cuda and torch.cuda.is_current_stream_capturing():
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
    # NumPy writes to the same memory leave no trace, so the edges are compared: a fraction of the time for rows.
    if met.graph is not None and met.graph.given is not None and not torch.equal(met.graph.given, edge_index):
        met.graph, met.times = None, 1
        return None
    if met.graph is not None and met.graph.stream != _stream_of(edge_index):
        return None
    if met.graph is None or not met.graph.fits(edge_index, met.graph.view(edge_index).least_sources, num_targets):
        met.graph = _sort(met.form, edge_index, num_targets)
        met.times = 0 if met.graph is None else met.times
    return met.graph


def keeps_graphs() -> bool:
    """Report whether a recording in progress keeps whole graphs, which `find_whole` then sorts at once."""
    return _keeper is not None


def may_remember(tensor: Tensor) -> bool:
    """Report whether results made of a tensor may be kept: in a recording only if its contents stay the same."""
    return _keeper is None or _keeper.keeps(tensor)


def register_whole(edge_index: Tensor, num_nodes: int) -> None:
    """Sort the edges of a graph that layers will meet often, so that `find_whole` returns them from the first time on.

    A GPU is waited for. Edges of any other form, or that do not lie among the nodes, are left as they are.

    Args:
        edge_index: (source, target), `[2, E]` in any order.
    """
    if type(edge_index) is not Tensor or edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.is_inference():
        return
    place, form = (edge_index.untyped_storage()._cdata, int(edge_index.storage_offset())), read_form(edge_index)
    known = _MET.get(place)
    if known is not None and known.graph is not None and known.form[1:] == form[1:]:
        return
    graph = _sort(form, edge_index, num_nodes)
    if graph is not None:
        forget_dead(_MET)
        met = _MET[place] = _Met(form)
        met.times, met.graph, met.is_static = _OFTEN_IF_SMALL, graph, True


def is_static(edge_index: Tensor) -> bool:
    """Report whether `register_whole` sorted these edges."""
    met = _MET.get((edge_index.untyped_storage()._cdata, int(edge_index.storage_offset())))
    return met is not None and met.is_static


class GraphKeeper:
    """Whole graphs of a recording, sorted at once and kept alive with it; active in a `with` block.

    Args:
        edges: Tensors whose contents stay the same as long as the recording is used. Only these are sorted.
    """

    def __init__(self, edges: Iterable[Tensor]) -> None:
        self._storages = {tensor.untyped_storage()._cdata for tensor in edges}
        self._graphs: dict[tuple[Any, ...], WholeGraph | None] = {}
        self._before: GraphKeeper | None = None

    def find(self, edge_index: Tensor, num_targets: int) -> WholeGraph | None:
        """Return the sorted edges of a graph; None for other edges."""
        storage = edge_index.untyped_storage()
        if storage._cdata not in self._storages:
            return None
        key = storage._cdata, edge_index.storage_offset(), edge_index.stride(), edge_index.shape, num_targets
        if key not in self._graphs and not is_capturing(edge_index):
            self._graphs[key] = _sort(read_form(edge_index), edge_index, num_targets)
        return self._graphs.get(key)

    def keeps(self, tensor: Tensor) -> bool:
        """Report whether the contents of a tensor stay the same."""
        return tensor.untyped_storage()._cdata in self._storages

    def list_tensors(self) -> list[Tensor]:
        """List the tensors of the sorted graphs, and of results that are remembered for them."""
        graphs = [graph for graph in self._graphs.values() if graph is not None]
        return [part for graph in graphs for part in graph.list_tensors()]

    def __enter__(self) -> None:
        global _keeper
        self._before, _keeper = _keeper, self

    def __exit__(self, *error: object) -> None:
        global _keeper
        _keeper, self._before = self._before, None


# The one of the recording in progress.
_keeper: GraphKeeper | None = None


@ordinary_tensors()
def _sort(form: Form, edge_index: Tensor, num_targets: int) -> WholeGraph | None:
    """Sort the edges of a graph; return None if they do not lead to so many nodes, which PyG refuses in its own
    words.
    """
    if edge_index.numel() == 0:
        return None
    least, most = torch.aminmax(edge_index, dim=1)
    return WholeGraph(form, edge_index, num_targets) if int(least.min()) >= 0 and int(most[1]) < num_targets else None
