"""Which plain `edge_index` tensors are known to be sorted by target.

A loader tells; a convolution asks. Tensors are known by their memory and by how often it was written to, so that a
narrowed view, as PyG's `trim_to_layer` takes it, is recognised, and a modified tensor, a copy or one that was given
the memory of another later is not. On a CPU what a loader tells is checked when it is first needed, and what stands
there each time: NumPy and `.data` write without a trace. On a GPU the host would wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pyg_direct.errors import ArgumentError
from pyg_direct.ops.check import INDEX_DTYPES
from pyg_direct.ops.offsets import compress, mark_edges, read_hops
from pyg_direct.runtime.mode import ordinary_tensors

if TYPE_CHECKING:
    # Entered by convolutions that ask: a loader only tells.
    from pyg_direct.ops.aggregate import Transposed
    from pyg_direct.ops.loops import Looped


class SortedEdges(NamedTuple):
    """Edges sorted by target, in the words of `ops.aggregate`.

    Attributes:
        indptr: Offsets of the targets, `[M + 1]` for the M nodes of the batch that edges may lead to; those above E
            count as E.
        row, target: Source and target of each edge, `[E]`.
        least_sources, least_targets: No edge has a source or a target beyond.
        max_degree: Upper bound of the edges of a target, None where it is not known.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    least_sources: int
    least_targets: int
    max_degree: int | None


class Form(NamedTuple):
    """What an `edge_index` is known by.

    Attributes:
        storage: Its memory. While this is held no other gets the address, so that an address tells memory apart.
        version: How often it was written to.
        stride, dtype, shape: As of the tensor.
    """

    storage: StorageWeakRef
    version: int
    stride: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]


class SortedBatch:
    """What is known of one `edge_index` and its views; does not keep them alive."""

    def __init__(self, form: Form, num_nodes: Sequence[int], num_targets: Sequence[int], num_edges: Sequence[int],
                 max_degree: int | None) -> None:  # fmt: skip
        self.storage, self.version, self.stride, self.dtype, self.shape = form
        # New in each hop.
        self._num_nodes, self._num_targets, self._num_edges = tuple(num_nodes), tuple(num_targets), tuple(num_edges)
        self.max_degree = max_degree
        self._indptr: Tensor | None = None
        self._indptr_edges = -1
        self._made: dict[Any, Any] = {}
        # Of the first edges, by their number: what tells them from others that are written over them.
        self._marks: dict[int, int] = {}

    def is_as_told(self, edge_index: Tensor) -> bool:
        """Whether `edge_index`, the first edges of the batch, are in order on a CPU, and those that were met before."""
        num_edges = edge_index.shape[1]
        if self._marks and num_edges in self._marks:
            return mark_edges(edge_index) == self._marks[num_edges]
        whole = edge_index.as_strided(self.shape, self.stride)
        if not self._marks:
            marks = self.find_marks(whole)
            if marks is None:
                return False
            self._marks = {0: 0, **dict(zip(accumulate(self._num_edges), marks, strict=True))}
        # Others may have come since the batch was read.
        elif mark_edges(whole) != self._marks[self.shape[1]]:
            return False
        if num_edges not in self._marks:
            self._marks[num_edges] = mark_edges(edge_index)
        return True

    def find_marks(self, edge_index: Tensor) -> list[int] | None:
        """Marks of all edges up to each hop's end; None unless they are sorted and lead to nodes met until then."""
        sources, targets = accumulate(self._num_nodes), accumulate(self._num_targets)
        next(sources, None)
        return read_hops(edge_index, list(zip(accumulate(self._num_edges), sources, targets, strict=False)))

    def view(self, edge_index: Tensor) -> SortedEdges:
        """The edges of `edge_index`, which holds the first of the batch."""
        least_sources, least_targets = self._read_bounds(edge_index)
        row, target = edge_index.unbind(0)
        return SortedEdges(self._find_offsets(target), row, target, least_sources, least_targets, self.max_degree)

    def fits(self, edge_index: Tensor, num_sources: int, num_targets: int) -> bool:
        """Whether the edges of `edge_index` lie among so many nodes."""
        least_sources, least_targets = self._read_bounds(edge_index)
        return least_sources <= num_sources and least_targets <= num_targets <= sum(self._num_targets)

    def read_hops(self, edge_index: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Nodes and edges of each hop; None where `edge_index` holds not all edges, or there are several types."""
        if edge_index.shape != self.shape or self._num_targets != self._num_nodes:
            return None
        return self._num_nodes, self._num_edges

    def _read_bounds(self, edge_index: Tensor) -> tuple[int, int]:
        """Ends of the sources and of the targets of the first edges."""
        num_edges = edge_index.shape[1]
        hop = next(hop for hop, bound in enumerate(accumulate(self._num_edges, initial=0)) if num_edges <= bound)
        return sum(self._num_nodes[: hop + 1]), sum(self._num_targets[:hop])

    def _find_offsets(self, target: Tensor) -> Tensor:
        if self._indptr is not None and self._indptr_edges >= target.numel():
            return self._indptr
        with ordinary_tensors():
            indptr = compress(target, sum(self._num_targets))
        if not _is_capturing(target):
            self._indptr, self._indptr_edges = indptr, target.numel()
        return indptr

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes of these edges, once for all layers that share them; without a gradient, in any mode."""
        if key in self._made:
            return self._made[key]
        with ordinary_tensors():
            made = make()
        if not _is_capturing(made):
            self._made[key] = made
        return made

    def transpose(self, edges: SortedEdges, num_rows: int) -> Transposed:
        """The same edges by source; they are those of a view of this batch, or made of these and remembered."""

        def make() -> Transposed:
            from pyg_direct.ops.aggregate import Transposed

            return Transposed.of(edges.row, edges.target, num_rows)

        made: Transposed = self.remember(("by source", edges.row.data_ptr(), edges.row.numel(), num_rows), make)
        return made

    def add_loops(self, edge_index: Tensor, num_targets: int, dtype: torch.dtype | None = None
                  ) -> tuple[SortedEdges, Tensor | None]:  # fmt: skip
        """The edges of `edge_index` and a loop behind those of each target, with GCN's weights in a dtype.

        Made once for the layers that share them; the loops that were there stay.
        """
        edges = self.view(edge_index)

        def make() -> Looped:
            from pyg_direct.ops.loops import add_loops

            return add_loops(*edges[:3], num_targets, dtype)

        key = "looped", edges.row.numel(), num_targets, dtype
        made: Looped = self.remember(key, make)
        degree = None if self.max_degree is None else self.max_degree + 1
        least = max(edges.least_sources, num_targets)
        return SortedEdges(*made[:3], least, num_targets, degree), made.weight


def _is_capturing(made: Any) -> bool:
    """Whether a graph is captured: what it is captured with is computed when it is replayed."""
    tensor = made if isinstance(made, Tensor) else made[0]
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


_BATCHES: dict[tuple[int, int], SortedBatch] = {}
# How often anything was told of edges.
told = 0
# Number of batches known, of either kind, at which those whose edges are gone are looked for.
_look_at: dict[int, int] = {}


def register_sorted(edge_index: Tensor, num_sampled_nodes: Sequence[int], num_sampled_edges: Sequence[int],
                    max_degree: int | None = None, num_sampled_targets: Sequence[int] | None = None
                    ) -> None:  # fmt: skip
    """Tell that the edges of a batch are sorted by target, hop after hop, as a loader's are.

    Args:
        edge_index: Local (source, target), `[2, E]`; it is neither read nor kept alive.
        num_sampled_nodes: New nodes of each hop, seeds first, as PyG gives them: edges of hop h lead to nodes that
            were new in hop h - 1, and come from nodes known after hop h. Those of the source's type, with types.
        num_sampled_edges: Edges of each hop.
        max_degree: Upper bound of the edges of a target; the largest fanout, None where one is -1.
        num_sampled_targets: New nodes of each hop of the target's type, where that is another than the source's.

    Raises:
        ArgumentError: the numbers do not fit the tensor.
    """
    targets = num_sampled_nodes if num_sampled_targets is None else num_sampled_targets
    hops = len(num_sampled_edges)
    num_edges = edge_index.shape[1]
    if len(num_sampled_nodes) != hops + 1 or len(targets) != hops + 1 or sum(num_sampled_edges) != num_edges:
        raise ArgumentError(
            "num_sampled_nodes must have one item more than num_sampled_edges, whose sum must be the "
            f"{num_edges} edges of edge_index, got {list(num_sampled_nodes)} and {list(num_sampled_edges)}"
        )
    # Writes to such a tensor leave no trace.
    if edge_index.is_inference() or (num_edges > 0 and edge_index.stride(1) != 1):
        return
    _keep((edge_index.untyped_storage()._cdata, int(edge_index.storage_offset())),
          SortedBatch(_read_form(edge_index), num_sampled_nodes, targets, num_sampled_edges, max_degree))  # fmt: skip


def register_found(edge_index: Tensor, num_sampled_nodes: Any, num_sampled_edges: Any, num_sampled_targets: Any
                   ) -> None:  # fmt: skip
    """`register_sorted` of edges that code of a program has made, where they are in order and the counts fit.

    A CPU looks when they are needed; a GPU is waited for.
    """
    lists = [list(given) if isinstance(given, (list, tuple)) else [-1]
             for given in (num_sampled_nodes, num_sampled_edges, num_sampled_targets)]  # fmt: skip
    nodes, counts, targets = lists
    are_counts = all(type(count) is int and count >= 0 for part in lists for count in part)
    if (
        not are_counts
        or len(nodes) != len(counts) + 1
        or len(targets) != len(nodes)
        or edge_index.dim() != 2
        or edge_index.shape != (2, sum(counts))
        or edge_index.dtype not in INDEX_DTYPES
    ):
        return
    batch = SortedBatch(_read_form(edge_index), nodes, targets, counts, None)
    if edge_index.is_cuda and batch.find_marks(edge_index) is None:
        return
    register_sorted(edge_index, nodes, counts, None, targets)


def _read_form(edge_index: Tensor) -> Form:
    storage = edge_index.untyped_storage()
    return Form(StorageWeakRef(storage), edge_index._version, edge_index.stride(), edge_index.dtype, edge_index.shape)


def _keep(place: tuple[int, int], batch: SortedBatch) -> None:
    global told
    told += 1
    forget_dead(_BATCHES)
    _BATCHES[place] = batch


def forget_dead(known: dict[Any, Any]) -> None:
    """Drop those whose edges are gone, where so many more came since the last look that it costs each the same."""
    if len(known) >= _look_at.get(id(known), 1):
        for key in [key for key, batch in list(known.items()) if batch.storage.expired()]:
            known.pop(key, None)
        _look_at[id(known)] = 2 * len(known) + 1


class _Relations:
    """Batches of relations that share memory, not asked for yet, by where their edges begin."""

    def __init__(self, pairs: Mapping[Any, Tensor], nodes: Mapping[Any, Sequence[int]],
                 edges: Mapping[Any, Sequence[int]], max_degree: int | None) -> None:  # fmt: skip
        first = next(iter(pairs.values()))
        storage = first.untyped_storage()
        self.storage, self.address, self._version = StorageWeakRef(storage), storage._cdata, first._version
        self.begin, self._dtype, self._max_degree = int(first.storage_offset()), first.dtype, max_degree
        # Batches hold the lists, which programs may change.
        self._nodes, self._edges = ({kind: tuple(own) for kind, own in counts.items()} for counts in (nodes, edges))
        # Of other batches that share the memory.
        self.beside: list[_Relations] = []
        self._kinds: dict[int, Any] | None = None

    def find(self, place: int) -> SortedBatch | None:
        """The batch whose edges begin at a place of the memory."""
        if self._kinds is None:
            # They stand one after the other, with room for one edge at least.
            sizes = [2 * max(sum(counts), 1) for counts in self._edges.values()]
            self._kinds = dict(zip(accumulate(sizes, initial=self.begin), self._edges, strict=False))
        kind = self._kinds.get(place)
        if kind is None:
            return None
        counts = self._edges[kind]
        num_edges = sum(counts)
        form = Form(self.storage, self._version, (max(num_edges, 1), 1), self._dtype, (2, num_edges))
        return SortedBatch(form, self._nodes[kind[0]], self._nodes[kind[-1]], counts, self._max_degree)


_RELATIONS: dict[int, _Relations] = {}


def register_relations(pairs: Mapping[Any, Tensor], num_sampled_nodes: Mapping[Any, Sequence[int]],
                       num_sampled_edges: Mapping[Any, Sequence[int]], max_degree: int | None = None
                       ) -> None:  # fmt: skip
    """As `register_sorted` for every relation of a sample that shares one piece of memory, for the price of one.

    Args:
        pairs: `edge_index` of each relation, in the order in which they stand in that memory, each with room for one
            edge at least and written to as often as the others.
        num_sampled_nodes: New nodes of each hop, by type.
        num_sampled_edges: Edges of each hop, by relation.
        max_degree: Upper bound of the edges of a target of one relation.
    """
    if not pairs or next(iter(pairs.values())).is_inference():
        return
    relations = _Relations(pairs, num_sampled_nodes, num_sampled_edges, max_degree)
    global told
    told += 1
    forget_dead(_RELATIONS)
    known = _RELATIONS.get(relations.address)
    if known is not None:
        relations.beside = [other for other in (known, *known.beside) if other.begin != relations.begin]
    _RELATIONS[relations.address] = relations


def _find_relation(place: tuple[int, int]) -> SortedBatch | None:
    """The batch of a relation that shares memory with others and was not asked for yet."""
    relations = _RELATIONS.get(place[0])
    if relations is None:
        return None
    return next(filter(None, (own.find(place[1]) for own in (relations, *relations.beside))), None)


def is_plain_tensor(edge_index: Any) -> bool:
    """Whether this has a memory to be known by, as sparse tensors and those of `torch.func` have not."""
    return (
        type(edge_index) is Tensor
        and edge_index.layout is torch.strided
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def is_registered(edge_index: Tensor) -> bool:
    """Whether edges of a batch lie, or lay, where those of `edge_index` begin."""
    if not (_BATCHES or _RELATIONS):
        return False
    storage = edge_index.untyped_storage()._cdata
    return storage in _RELATIONS or (storage, edge_index.storage_offset()) in _BATCHES


def find_batch(edge_index: Tensor) -> SortedBatch | None:
    """The batch whose edges, or whose first edges, these are; None unless they are known to be sorted."""
    if (
        type(edge_index) is not Tensor
        or edge_index.layout is not torch.strided
        or edge_index.dim() != 2
        or edge_index.is_inference()
    ):
        return None
    place = edge_index.untyped_storage()._cdata, int(edge_index.storage_offset())
    batch, is_kept = _BATCHES.get(place), True
    if batch is None:
        batch, is_kept = _find_relation(place), False
    if (
        batch is None
        or edge_index._version != batch.version
        or edge_index.shape[0] != 2
        or edge_index.shape[1] > batch.shape[1]
        or edge_index.stride() != batch.stride
        or edge_index.dtype != batch.dtype
    ):
        return None
    if not edge_index.is_cuda and not batch.is_as_told(edge_index):
        # What was made of them is of no use any more.
        _BATCHES.pop(place, None)
        return None
    if not is_kept:
        _keep(place, batch)
    return batch


def find_sorted(edge_index: Tensor) -> SortedEdges | None:
    """The offsets of a sorted `edge_index` or of a view of its first edges; None for any other tensor."""
    batch = find_batch(edge_index)
    return None if batch is None else batch.view(edge_index)
