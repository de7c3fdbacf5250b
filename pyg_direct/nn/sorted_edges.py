"""Registry of plain `edge_index` tensors that are known to be sorted by target.

A loader registers them (`register_batch`), and a convolution asks; `to_edge_index` passes the order to PyG. A tensor is
recognized by its memory and its count of writes. So a narrowed view, as PyG's `trim_to_layer` takes it, is recognized.
A modified tensor or a copy is not, nor is a tensor that later gets the memory of another. On a CPU the loader's
registration is checked at first use, and the contents at each use: NumPy and `.data` write without a trace. On a GPU
the host would wait for that.

It also knows the batch vectors of many small graphs (`register_graphs`), by their identity and count of writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.argument_checks import INDEX_DTYPES
from pyg_direct.ops.local_ids.build_csr import compress_ids, mark_edges, read_hops
from pyg_direct.runtime.host.tensor_views import ordinary_tensors

if TYPE_CHECKING:
    # Imported by convolutions that ask: a loader only registers.
    from pyg_direct.ops.aggregate.build_edge_layout import Looped
    from pyg_direct.ops.aggregate.sum_rows import Transposed


class SortedEdges(NamedTuple):
    """Edges sorted by target, in the words of `ops.aggregate.sum_rows`.

    Attributes:
        indptr: Offsets of the targets, `[M + 1]` for the M nodes of the batch that edges may lead to; offsets above E
            count as E.
        row, target: Source and target of each edge, `[E]`.
        least_sources, least_targets: Upper bounds of the sources and of the targets.
        max_degree: Upper bound of the edges of a target, None if it is not known.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    least_sources: int
    least_targets: int
    max_degree: int | None


class Form(NamedTuple):
    """Key of an `edge_index`.

    Attributes:
        storage: Its memory. While this is held no other tensor gets the address, so that an address identifies memory.
    """

    storage: StorageWeakRef
    version: int
    stride: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]


# Results that are kept for other tensors of the same edges.
_MOST_MADE = 8


class _MadeFor(NamedTuple):
    """Result for tensors of a program.

    Attributes:
        copies: Their contents on a CPU.
        held: Aliases of them, so that no other tensor gets their memory, whatever the program does with its own.
    """

    made: Any
    copies: tuple[Tensor, ...]
    held: tuple[Tensor, ...]


class SortedBatch:
    """Known order of one `edge_index` and its views; does not keep them alive."""

    def __init__(self, form: Form, num_nodes: Sequence[int], num_targets: Sequence[int], num_edges: Sequence[int],
                 max_degree: int | None) -> None:  # fmt: skip
        self.storage, self.version, self.stride, self.dtype, self.shape = form
        # New in each hop.
        self._num_nodes, self._num_targets, self._num_edges = tuple(num_nodes), tuple(num_targets), tuple(num_edges)
        self.max_degree = max_degree
        self._indptr: Tensor | None = None
        self._indptr_edges = -1
        self._made: dict[Any, Any] = {}
        # Hash of the first edges, by their number: it reveals edges that are written over them.
        self._marks: dict[int, int] = {}

    def is_as_told(self, edge_index: Tensor) -> bool:
        """Report whether `edge_index`, the first edges of the batch, is in order on a CPU, and unchanged since earlier
        checks.
        """
        num_edges = edge_index.shape[1]
        if self._marks and num_edges in self._marks:
            return mark_edges(edge_index) == self._marks[num_edges]
        whole = edge_index.as_strided(self.shape, self.stride)
        if not self._marks:
            marks = self.find_marks(whole)
            if marks is None:
                return False
            self._marks = {0: 0, **dict(zip(accumulate(self._num_edges), marks, strict=True))}
        # Other edges may have been written since the batch was read.
        elif mark_edges(whole) != self._marks[self.shape[1]]:
            return False
        if num_edges not in self._marks:
            self._marks[num_edges] = mark_edges(edge_index)
        return True

    def find_marks(self, edge_index: Tensor) -> list[int] | None:
        """Return marks of all edges up to each hop's end; None unless they are sorted and lead to nodes found until
        then.
        """
        sources, targets = accumulate(self._num_nodes), accumulate(self._num_targets)
        next(sources, None)
        return read_hops(edge_index, list(zip(accumulate(self._num_edges), sources, targets, strict=False)))

    def view(self, edge_index: Tensor) -> SortedEdges:
        """Return the edges of `edge_index`, which holds the first of the batch."""
        least_sources, least_targets = self._read_bounds(edge_index)
        row, target = edge_index.unbind(0)
        return SortedEdges(self._find_offsets(target), row, target, least_sources, least_targets, self.max_degree)

    def fits(self, edge_index: Tensor, num_sources: int, num_targets: int) -> bool:
        """Report whether the edges of `edge_index` lie among so many nodes."""
        least_sources, least_targets = self._read_bounds(edge_index)
        return least_sources <= num_sources and least_targets <= num_targets <= sum(self._num_targets)

    def count_targets(self, edge_index: Tensor) -> int:
        """Return an upper bound of the targets of the first edges, the first nodes of their type."""
        return self._read_bounds(edge_index)[1]

    def read_hops(self, edge_index: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return nodes and edges of each hop; None if `edge_index` does not hold all edges, or there are several
        types.
        """
        if edge_index.shape != self.shape or self._num_targets != self._num_nodes:
            return None
        return self._num_nodes, self._num_edges

    def read_relation(self, edge_index: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
        """Return nodes of the sources' type, nodes of the targets' type and edges of each hop; None if `edge_index`
        does not hold all edges.
        """
        return (self._num_nodes, self._num_targets, self._num_edges) if edge_index.shape == self.shape else None

    def _read_bounds(self, edge_index: Tensor) -> tuple[int, int]:
        """Return the upper bounds of the sources and of the targets of the first edges."""
        num_edges = edge_index.shape[1]
        hop = next(hop for hop, bound in enumerate(accumulate(self._num_edges, initial=0)) if num_edges <= bound)
        return sum(self._num_nodes[: hop + 1]), sum(self._num_targets[:hop])

    def _find_offsets(self, target: Tensor) -> Tensor:
        if self._indptr is not None and self._indptr_edges >= target.numel():
            return self._indptr
        with ordinary_tensors():
            indptr = compress_ids(target, sum(self._num_targets))
        if not is_capturing(target):
            self._indptr, self._indptr_edges = indptr, target.numel()
        return indptr

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of `make` for these edges, computed once for all layers that share them; without a
        gradient, in any mode.
        """
        if key in self._made:
            return self._made[key]
        with ordinary_tensors():
            made = make()
        if not is_capturing(made):
            self._made[key] = made
        return made

    def remember_for(self, given: tuple[Tensor, ...], key: Any, make: Callable[[], Any], *, keeps_all: bool) -> Any:
        """As `remember`, for other tensors of a program too, until they change.

        Args:
            given: The tensors, on one device.
            keeps_all: Whether results for other tensors are kept; otherwise only those for the last few.
        """
        place = key, tuple([(part.data_ptr(), part._version, part.stride(), part.dtype) for part in given])
        # On a CPU a program may write to them by NumPy, which leaves no trace.
        watched = () if given[0].is_cuda else given
        known = self._made.get(place)
        if known is not None and not all(map(torch.equal, known.copies, watched)):
            del self._made[place]
        elif known is None and not keeps_all:
            others = [other for other, made in self._made.items() if isinstance(made, _MadeFor) and other[0] == key]
            for other in others[: max(0, len(others) - _MOST_MADE + 1)]:
                del self._made[other]
        return self.remember(place, lambda: _MadeFor(
            make(), tuple(map(torch.clone, watched)), tuple([part.detach() for part in given]))).made  # fmt: skip

    def transpose(self, edges: SortedEdges, num_rows: int) -> Transposed:
        """Return the same edges by source. `edges` are a view of this batch, or made of it and remembered."""

        def make() -> Transposed:
            from pyg_direct.ops.aggregate.sum_rows import Transposed

            return Transposed.of(edges.row, edges.target, num_rows)

        made: Transposed = self.remember(("by source", edges.row.data_ptr(), edges.row.numel(), num_rows), make)
        return made

    def add_loops(self, edge_index: Tensor, num_targets: int, dtype: torch.dtype | None = None
                  ) -> tuple[SortedEdges, Tensor | None]:  # fmt: skip
        """Return the edges of `edge_index` with a loop after the edges of each target, and GCN's weights in a dtype.

        Computed once for the layers that share them; existing loops stay.
        """
        edges = self.view(edge_index)

        def make() -> Looped:
            from pyg_direct.ops.aggregate.build_edge_layout import add_loops

            return add_loops(*edges[:3], num_targets, dtype)

        key = "looped", edges.row.numel(), num_targets, dtype
        made: Looped = self.remember(key, make)
        degree = None if self.max_degree is None else self.max_degree + 1
        least = max(edges.least_sources, num_targets)
        return SortedEdges(*made[:3], least, num_targets, degree), made.weight


def is_capturing(made: Any) -> bool:
    """Report whether a graph is being captured: its inputs are computed at replay."""
    tensor = made
    while not isinstance(tensor, Tensor):
        tensor = tensor[0]
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def may_wait(tensor: Tensor) -> bool:
    """Report whether the host may wait for the device of a tensor.

    It must not in a captured graph, nor in the trial before it, in which waits are errors.
    """
    return not tensor.is_cuda or not (is_capturing(tensor) or torch.cuda.get_sync_debug_mode() > _WARNS)


# Mode of torch in which a wait for a GPU is a warning; in the next one it is an error.
_WARNS = 1
_BATCHES: dict[tuple[int, int], SortedBatch] = {}
# Number of registrations of edges so far.
told = 0
# Number of known batches, of either kind, at which dead ones are searched for.
_look_at: dict[int, int] = {}


def register_sorted(edge_index: Tensor, num_sampled_nodes: Sequence[int], num_sampled_edges: Sequence[int],
                    max_degree: int | None = None, num_sampled_targets: Sequence[int] | None = None
                    ) -> None:  # fmt: skip
    """Register the edges of a batch as sorted by target, hop after hop, as a loader makes them.

    Args:
        edge_index: Local (source, target), `[2, E]`; it is neither read nor kept alive.
        num_sampled_nodes: New nodes of each hop, seeds first, as PyG gives them; with types, of the source's type.
            Edges of hop h lead to nodes that were new in hop h - 1, and come from nodes known after hop h.
        max_degree: Upper bound of the edges of a target; the largest fanout, None if one is -1.
        num_sampled_targets: New nodes of each hop of the target's type, if it differs from the source's.
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
          SortedBatch(read_form(edge_index), num_sampled_nodes, targets, num_sampled_edges, max_degree))  # fmt: skip


def register_found(edge_index: Tensor, num_sampled_nodes: Any, num_sampled_edges: Any, num_sampled_targets: Any
                   ) -> None:  # fmt: skip
    """Call `register_sorted` for edges that a program's code has made, if they are in order and the counts fit.

    A CPU checks when they are needed; a GPU is waited for.
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
    batch = SortedBatch(read_form(edge_index), nodes, targets, counts, None)
    if edge_index.is_cuda and batch.find_marks(edge_index) is None:
        return
    register_sorted(edge_index, nodes, counts, None, targets)


# By id of a batch vector: (the vector, its count of writes, first node of each graph and the end).
_VECTORS: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}


def register_graphs(vector: Tensor, begins: Tensor) -> None:
    """Register the graph of each node of a batch, which is not kept alive.

    Args:
        vector: Ascending, int64 `[N]`.
        begins: First node of each graph, and the end, int64 `[B + 1]`.
    """
    if not vector.is_inference():
        place = id(vector)
        _VECTORS[place] = weakref.ref(vector, lambda _: _VECTORS.pop(place, None)), vector._version, begins


def find_graphs(vector: Tensor) -> Tensor | None:
    """Return the first node of each graph of a registered, unchanged batch vector, and the end; None for any other
    tensor.
    """
    known, version, begins = _VECTORS.get(id(vector), (None, -1, None))
    return begins if known is not None and known() is vector and vector._version == version else None


def read_form(edge_index: Tensor) -> Form:
    """Return the key of an `edge_index`, `[2, E]`, as it is now."""
    storage = edge_index.untyped_storage()
    return Form(StorageWeakRef(storage), edge_index._version, edge_index.stride(), edge_index.dtype, edge_index.shape)


def _keep(place: tuple[int, int], batch: SortedBatch) -> None:
    global told
    told += 1
    forget_dead(_BATCHES)
    _BATCHES[place] = batch


def forget_dead(known: dict[Any, Any]) -> None:
    """Drop dead entries, if so many more came since the last search that its cost per entry is constant."""
    if len(known) >= _look_at.get(id(known), 1):
        for key in [key for key, batch in list(known.items()) if batch.storage.expired()]:
            known.pop(key, None)
        _look_at[id(known)] = 2 * len(known) + 1


class _Relations:
    """Batches of relations that share memory, not requested yet, by the position of their first edge.

    Args:
        memory: A tensor over that memory.
        begin: Position of the first edge.
        list_nodes: Returns the new nodes of each hop, by type.
        list_counts: Returns the edges of each hop, by relation in the order in that memory.
        max_degree: Upper bound of the edges of a target of one relation.
    """

    def __init__(self, memory: Tensor, begin: int, version: int, list_nodes: Callable[[], Mapping[Any, Sequence[int]]],
                 list_counts: Callable[[], Mapping[Any, Sequence[int]]], max_degree: int | None) -> None:  # fmt: skip
        storage = memory.untyped_storage()
        self.storage, self.address, self._version = StorageWeakRef(storage), storage._cdata, version
        self.begin, self._dtype, self._max_degree = begin, memory.dtype, max_degree
        self._list_nodes, self._list_counts = list_nodes, list_counts
        self._nodes: Mapping[Any, Sequence[int]] = {}
        self._edges: Mapping[Any, Sequence[int]] = {}
        # Other batches may share the memory.
        self.beside: list[_Relations] = []
        self._kinds: dict[int, Any] | None = None

    def find(self, place: int) -> SortedBatch | None:
        """Return the batch whose edges begin at a position of the memory."""
        if self._kinds is None:
            self._nodes, self._edges = self._list_nodes(), self._list_counts()
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
    """Register every relation of a sample that shares one block of memory as `register_sorted` does, for the price of
    one.

    Args:
        pairs: `edge_index` of each relation, in the order in that memory. Each has room for at least one edge and the
            same count of writes.
        num_sampled_nodes: New nodes of each hop, by type.
        max_degree: Upper bound of the edges of a target of one relation.
    """
    if pairs:
        first = next(iter(pairs.values()))
        nodes, counts = _as_tuples(num_sampled_nodes), _as_tuples(num_sampled_edges)
        begin = int(first.storage_offset())
        _keep_relations(first, begin, first._version, lambda: nodes, lambda: counts, max_degree)


def _as_tuples(counts: Mapping[Any, Sequence[int]]) -> dict[Any, tuple[int, ...]]:
    """Copy counts, as batches hold the lists, which programs may change."""
    return dict(zip(counts, map(tuple, counts.values()), strict=True))


def _keep_relations(memory: Tensor, *args: Any) -> None:
    """Keep the relations of a sample; the arguments are those of `_Relations`."""
    if memory.is_inference():
        return
    relations = _Relations(memory, *args)
    global told
    told += 1
    forget_dead(_RELATIONS)
    known = _RELATIONS.get(relations.address)
    if known is not None:
        relations.beside = [other for other in (known, *known.beside) if other.begin != relations.begin]
    _RELATIONS[relations.address] = relations


def _find_relation(place: tuple[int, int]) -> SortedBatch | None:
    """Return the batch of a relation that shares memory with others and was not requested yet."""
    relations = _RELATIONS.get(place[0])
    if relations is None:
        return None
    return next(filter(None, (own.find(place[1]) for own in (relations, *relations.beside))), None)


def register_hops(batch: Any, num_sampled_nodes: list[int], num_sampled_edges: list[int], max_degree: int | None
                  ) -> None:  # fmt: skip
    """Call `register_sorted` for a batch, a `Data` with counts of new nodes and edges of each hop."""
    edge_index = batch._store._mapping.get("edge_index")
    if type(edge_index) is Tensor:
        register_sorted(edge_index, num_sampled_nodes, num_sampled_edges, max_degree)


def register_batch(batch: Any, out: Any, is_checked: bool = True) -> None:
    """Register the edges of a batch as sorted by target.

    Args:
        batch: The `Data` or `HeteroData` of a sample.
        out: The sample, or PyG's output of a pyg_direct sampler, whose edges lead from new nodes to known ones hop
            after hop. Subgraphs, which have no hops, are not registered.
        is_checked: True if the sample is as pyg_direct made it. A user's subclass may give edges in any order; such
            edges are not registered if they are not in order.
    """
    nodes, edges = out.num_sampled_nodes, out.num_sampled_edges
    if nodes is None or edges is None:
        return
    if not is_checked:
        _register_found_batch(batch, nodes, edges)
        return
    max_degree = getattr(out, "max_degree", None)
    if not isinstance(out, HeteroSamplerOutput):
        register_hops(batch, nodes, edges, max_degree)
        return
    # For outputs of pyg_direct samplers: all relations, as long as they share memory.
    packed = getattr(out, "packed", None)
    if packed is not None:
        own = packed.packed
        if own.relations:
            # Pairs that are viewed later, each counts its own writes.
            begin = own.begin + own.ends.storage_offset()
            _keep_relations(own.ends, begin, 0, own.list_nodes, own.list_counts, max_degree)
        return
    for kind, counts in edges.items():
        edge_index = batch._edge_store_dict[kind]._mapping.get("edge_index") if kind in out.row else None
        if type(edge_index) is Tensor:
            register_sorted(edge_index, nodes[kind[0]], counts, max_degree, nodes[kind[-1]])


def _register_found_batch(batch: Any, nodes: Any, edges: Any) -> None:
    """Register edges that are in order after all, by the counts that a program's sampler gave; a GPU is waited for."""
    if isinstance(nodes, Mapping) and isinstance(edges, Mapping) and isinstance(batch, HeteroData):
        for kind, store in batch._edge_store_dict.items():
            edge_index = store._mapping.get("edge_index")
            if type(edge_index) is Tensor and kind in edges:
                register_found(edge_index, nodes.get(kind[0]), edges[kind], nodes.get(kind[-1]))
    elif isinstance(batch, Data):
        edge_index = batch._store._mapping.get("edge_index")
        if type(edge_index) is Tensor:
            register_found(edge_index, nodes, edges, nodes)


def to_edge_index(batch: Any) -> Any:
    """Give a batch PyG's `EdgeIndex` for each `edge_index`, marked as sorted by target if it is known to be; for
    `transform=`.

    `EdgeIndex` lets PyG pick kernels for sorted edges, at a price on the host for each convolution. Accelerated models
    do not need it, and leave such edges to PyG.

    Args:
        batch: `Data` or `HeteroData`, changed in place. Edges that are not known to be sorted get no `sort_order`.

    Raises:
        ArgumentTypeError: `batch` is neither.

    Example:
        >>> ring = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> (batch,) = NeighborLoader(ring, [-1], torch.tensor([2]), device="cpu", transform=to_edge_index)
        >>> batch.edge_index.sort_order
        'col'
    """
    if not isinstance(batch, (Data, HeteroData)):
        raise ArgumentTypeError(f"batch must be a Data or a HeteroData, got {type(batch).__name__}")
    sizes = None if isinstance(batch, Data) else {kind: batch[kind].num_nodes for kind in batch.node_types}
    for store in batch.edge_stores:
        edge_index = store._mapping.get("edge_index")
        if type(edge_index) is Tensor:
            size = (batch.num_nodes,) * 2 if sizes is None else (sizes[store._key[0]], sizes[store._key[-1]])
            order = None if find_batch(edge_index) is None else "col"
            store.edge_index = EdgeIndex(edge_index.contiguous(), sparse_size=size, sort_order=order)
    return batch


def is_plain_tensor(edge_index: Any) -> bool:
    """Report whether this has a memory to be recognized by; sparse tensors and tensors of `torch.func` have none."""
    return (
        type(edge_index) is Tensor
        and edge_index.layout is torch.strided
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def is_registered(edge_index: Tensor) -> bool:
    """Report whether edges of a batch lie, or lay, at the start of `edge_index`."""
    if not (_BATCHES or _RELATIONS):
        return False
    storage = edge_index.untyped_storage()._cdata
    return storage in _RELATIONS or (storage, edge_index.storage_offset()) in _BATCHES


def find_batch(edge_index: Tensor) -> SortedBatch | None:
    """Return the batch whose edges, or whose first edges, these are; None unless they are known to be sorted."""
    if (
        type(edge_index) is not Tensor
        or edge_index.layout is not torch.strided
        or edge_index.dim() != 2
        or edge_index.shape[0] != 2
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
        or edge_index.shape[1] > batch.shape[1]
        or edge_index.stride() != batch.stride
        or edge_index.dtype != batch.dtype
    ):
        return None
    if not edge_index.is_cuda and not batch.is_as_told(edge_index):
        # Results made of them are of no use any more.
        _BATCHES.pop(place, None)
        return None
    if not is_kept:
        _keep(place, batch)
    return batch


def find_sorted(edge_index: Tensor) -> SortedEdges | None:
    """Return the offsets of a sorted `edge_index` or of a view of its first edges; None for any other tensor."""
    batch = find_batch(edge_index)
    return None if batch is None else batch.view(edge_index)
