"""`NodeEmbedding`: rows that are learned, for nodes without features, in GPU memory or on the host.

Its parameter is the table as the GPU sees it, also if the table lies in host memory. So gradients are sparse tensors of
the GPU, as of `torch.nn.Embedding(sparse=True)`, and autograd and `GradScaler` treat them as such. The
optimizers of `sparse_optimizers.py` read and write the rows of a batch in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.hot_rows import Listing, check_hotness, check_scores
from pyg_direct.features.tiers.base import ReadErrors
from pyg_direct.features.trained_rows import (
    PLACEMENTS,
    HotRows,
    TrainedRows,
    choose_hot_rows,
    find_rows,
    hold_rows,
    place_trained,
)
from pyg_direct.ops.argument_checks import INDEX_DTYPES, check_choice, check_count, check_ids, checks_keywords
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.host_memory import parse_size
from pyg_direct.typing import Device

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Attributes that a copy or a pickle makes anew.
_OWN = ("_rows", "_errors")
# Bytes that processes copy from the first at once.
_PIECE_BYTES = 64 << 20


class NodeEmbedding(torch.nn.Embedding):
    """Rows that are learned, by node id, as of `torch.nn.Embedding(sparse=True)`; call it with `batch.n_id`.

    The table may be larger than GPU memory. It then lies in host memory, which kernels of the GPU read and write in
    place, and only rows of a batch travel. Train it with `SparseAdam`, `SparseSGD` or `SparseAdagrad`. If the table is
    in GPU memory or on a CPU, optimizers of torch for sparse gradients train it too.

    Args:
        num_embeddings: Number of nodes, N.
        embedding_dim: Width of a row, D.
        device: Device of the rows of a batch; None is the current GPU, or the CPU if there is no GPU.
        dtype: Of the rows, a floating dtype; None for torch's default.
        placement: Memory of the table: `cuda`, or `unified` or `pinned` host memory. `auto` takes GPU memory if the
            table and Adam's numbers fit what a loader may take of it. Otherwise it takes the host memory that the GPU
            reads faster. On a CPU there is only one.
        device_cache_size: Of a table on the host: GPU memory for hot rows, in bytes, `"200M"`, or a share of the rows
            such as `"20%"`. An optimizer takes as much for each number that it keeps.
        csr_topo: The graph, to rank rows by.
        hotness: Ranking of rows: `degree` (by `csr_topo`), or one score for each row, integers or floats `[N]`, such
            as `expected_reads` returns. Without both, the first rows are the hot ones.
        process_group: Processes that each hold the table and train together: gradients are their mean, as of
            `DistributedDataParallel`, and the first of them gives the initial rows. All call it, and backward, alike.
        _weight, _freeze: Rows to begin with, `[N, D]` of a floating dtype, and True if they are not trained; see
            `from_pretrained`.

    Attributes:
        weight: The table, `[N, D]`, as a parameter on `device`.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.
        MemoryLimitError: host memory does not hold the table.

    Example:
        >>> users = NodeEmbedding(num_embeddings=100, embedding_dim=8, device="cpu")
        >>> optimizer = SparseAdam(users.parameters(), lr=0.01)
        >>> users(torch.tensor([3, 7, 3])).sum().backward()
        >>> optimizer.step()  # of the rows 3 and 7
        >>> users.weight.grad.coalesce().indices()
        tensor([[3, 7]])
    """

    weight: torch.nn.Parameter
    _rows: TrainedRows | None
    _errors: ReadErrors | None

    @checks_keywords
    def __init__(self, num_embeddings: int, embedding_dim: int, *, device: Device = None,
                 dtype: torch.dtype | None = None, placement: str = "auto", device_cache_size: int | str = 0,
                 csr_topo: Listing | None = None, hotness: str | Tensor = "degree", process_group: Any = None,
                 _weight: Tensor | None = None, _freeze: bool = False) -> None:  # fmt: skip
        check_count("num_embeddings", num_embeddings, 0)
        check_count("embedding_dim", embedding_dim)
        check_choice("placement", placement, PLACEMENTS)
        check_hotness(hotness)
        if csr_topo is not None and (not hasattr(csr_topo, "node_count") or csr_topo.node_count > num_embeddings):
            raise ArgumentError(f"csr_topo must be a CSRTopo of at most {num_embeddings} nodes, got {csr_topo!r}")
        if isinstance(hotness, Tensor):
            check_scores(hotness, csr_topo, num_embeddings)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in _DTYPES:
            raise ArgumentTypeError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")
        target = resolve_device(device)
        if target.type == "cpu" and placement == "cuda":
            raise ArgumentError("placement='cuda' needs a GPU, got device='cpu': leave placement out")
        shape = torch.Size((num_embeddings, embedding_dim))
        parse_size(device_cache_size, shape.numel() * dtype.itemsize)
        table, block = place_trained(shape, dtype, placement, target)
        super().__init__(num_embeddings, embedding_dim, sparse=True, _weight=table, _freeze=_freeze)
        self._group, self._errors = process_group, None
        self.register_forward_pre_hook(_refresh)
        if _weight is None:
            self.reset_parameters()
        else:
            with torch.no_grad():
                self.weight.copy_(_weight)
        if process_group is not None:
            _take_first(self.weight.detach(), process_group)
        hot_rows = None if block is None else choose_hot_rows(table, device_cache_size, hotness, csr_topo)
        self._hold(None if block is None else TrainedRows(self.weight.detach(), block, hot_rows))

    def _hold(self, rows: TrainedRows | None) -> None:
        """Keep the rows of a table on the host; those of other tables are found by the parameter alone."""
        self._rows = rows
        if rows is not None:
            hold_rows(self.weight, rows)

    @property
    def placement(self) -> str:
        """Memory of the table: `cuda`, `unified`, `pinned` or `cpu`."""
        return find_rows(self.weight).placement

    @property
    def num_hot_rows(self) -> int:
        """Rows of a table on the host that are in GPU memory too."""
        return 0 if self._rows is None else self._rows.num_hot_rows

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> NodeEmbedding:  # type: ignore[override]
        """Make an embedding of given rows, which are copied.

        Args:
            embeddings: `[N, D]` of a floating dtype, on any device.
            freeze: True for rows that are not trained.
            options: Of `NodeEmbedding`, beside the sizes and the dtype.

        Raises:
            ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.
        """
        if not isinstance(embeddings, Tensor):
            raise ArgumentTypeError(f"embeddings must be a tensor, got {type(embeddings).__name__}")
        if embeddings.dim() != 2:
            raise ArgumentError(f"embeddings must have shape [N, D], got {tuple(embeddings.shape)}")
        return cls(*embeddings.shape, dtype=embeddings.dtype, _weight=embeddings, _freeze=freeze, **options)

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of nodes, `[..., D]` of the table's dtype on its device.

        On a GPU, an id that is out of range gives a row of zeros, because a check at once would cost a wait. Its
        `IdError` is raised by the next call, and no row is trained by it.

        Args:
            input: int32 or int64 `[...]`, such as `batch.n_id`, on the device of the table.

        Raises:
            ArgumentError: ids on another device.
            ArgumentTypeError: no tensor, or ids of another dtype.
            IdError: an id on the CPU is out of range; or, on a GPU, one of the last call was.
        """
        weight = self.weight
        if not isinstance(input, Tensor):
            raise ArgumentTypeError(f"n_id must be a tensor, got {type(input).__name__}")
        if input.dtype not in INDEX_DTYPES:
            raise ArgumentTypeError(f"n_id must have dtype int64 or int32, got {input.dtype}: give its .long()")
        if input.device != weight.device:
            raise ArgumentError(f"n_id must be on {weight.device}, as the rows are, got {input.device}: give its "
                                f".to({str(weight.device)!r})")  # fmt: skip
        ids = check_ids("n_id", input.reshape(-1), len(weight))
        if weight.is_cuda:
            self._errors = self._errors or ReadErrors(True)
            self._errors.raise_first("n_id", len(weight))
        word = None if self._errors is None else self._errors.word
        rows: Tensor = _Lookup.apply(weight, ids, find_rows(weight), word, self._group)
        return rows.view(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Return the options that the text of a module shows."""
        hot = f", num_hot_rows={self.num_hot_rows}" if self.num_hot_rows > 0 else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, placement={self.placement!r}{hot}"

    # Memory that stays where it is, and copies of it.

    def _apply(self, fn: Any, recurse: bool = True) -> NodeEmbedding:
        if self._rows is None:
            self._errors = None
            return super()._apply(fn, recurse)  # type: ignore[return-value]
        weight = self.weight
        like = fn(weight.detach()[:0])
        if like.device != weight.device or like.dtype != weight.dtype:
            raise ArgumentError(f"a NodeEmbedding in {self.placement} memory stays there, as {weight.dtype} for "
                                f"{weight.device}, got a move to {like.dtype} on {like.device}: make another, and load "
                                "its state_dict()")  # fmt: skip
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._rows is not None and not keep_vars:
            # A checkpoint of it is read into host memory then.
            destination[f"{prefix}weight"] = self._rows.list_rows()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if self._rows is not None:
            local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _OWN}
        if self._group is not None:
            raise ArgumentTypeError("a NodeEmbedding with a process_group cannot be copied or pickled: save its "
                                    "state_dict()")  # fmt: skip
        if self._rows is not None:
            rows = torch.nn.Parameter(self._rows.list_rows(), self.weight.requires_grad)
            hot = self._rows.hot_rows
            state["_parameters"] = {"weight": rows}
            hottest = None if hot is None else (hot.ids.cpu(), hot.misses)
            state["_placed"] = self.placement, self.weight.device, hottest
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        placed = state.pop("_placed", None)
        super().__setstate__(state)
        self._rows = self._errors = None
        if placed is None:
            return
        placement, device, hottest = placed
        if device.type == "cuda" and not torch.cuda.is_available():
            # Pickled where there was a GPU: the rows stay on the CPU.
            return
        source = self.weight
        table, block = place_trained(source.shape, source.dtype, placement, device)
        table.copy_(source.detach())
        self.weight = torch.nn.Parameter(table, source.requires_grad)
        hot_rows = None if hottest is None else HotRows.of(hottest[0].to(device), len(table), hottest[1])
        self._hold(TrainedRows(self.weight.detach(), block, hot_rows))


def _refresh(module: Any, args: Any) -> None:
    """Refresh hot rows. As a hook, it keeps recorded passes away: they would neither do so nor name a wrong id."""
    if module._rows is not None:
        module._rows.refresh()


class _Lookup(torch.autograd.Function):
    """Rows by id, with a sparse gradient that is not coalesced, as of `torch.nn.functional.embedding`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, rows: TrainedRows, errors: Tensor | None, group: Any
                ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(ids)
        ctx.shape, ctx.group = weight.shape, group
        return rows.read(ids, errors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ids,), rows = ctx.saved_tensors, grads[0]
        ids = ids.long()
        if ids.is_cuda:
            # The forward pass has reported ids out of range; they must not reach a kernel of torch.
            is_row = (ids >= 0) & (ids < ctx.shape[0])
            ids, rows = torch.where(is_row, ids, 0), torch.where(is_row[:, None], rows.contiguous(), 0)
        else:
            # A scaler writes to gradients, and other tensors may have the memory of this one.
            rows = rows.clone(memory_format=torch.contiguous_format)
        if ctx.group is not None:
            ids, rows = _join_gradients(ids, rows, ctx.group)
        grad = torch.sparse_coo_tensor(ids[None], rows, ctx.shape, check_invariants=False)
        return grad, None, None, None, None


def _join_gradients(ids: Tensor, rows: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Return the ids of all processes of a group, `[m]`, and rows `[m, D]` whose sum is the mean of the gradients."""
    size = dist.get_world_size(group)
    counts = [ids.new_empty(1) for _ in range(size)]
    dist.all_gather(counts, ids.new_tensor([len(ids)]), group=group)
    lengths = torch.cat(counts).tolist()
    # Collectives of torch take parts of one length.
    most = max(lengths)
    parts = []
    for own in (ids, rows / size):
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        taken = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(taken, padded, group=group)
        parts.append(torch.cat([part[:length] for part, length in zip(taken, lengths, strict=True)]))
    return parts[0], parts[1]


def _take_first(table: Tensor, group: Any) -> None:
    """Give all processes of a group the table of the first, `[N, D]`, piece by piece."""
    row_bytes = max(1, table.shape[1] * table.element_size())
    for part in table.split(max(1, _PIECE_BYTES // row_bytes)):
        # NCCL need not know memory of the host.
        piece = part.clone()
        dist.broadcast(piece, dist.get_global_rank(group, 0), group=group)
        part.copy_(piece)
