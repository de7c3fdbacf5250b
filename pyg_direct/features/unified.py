"""`UnifiedTensor`: a tensor in host memory that the CPU and GPUs read in place (PyTorch-Direct, section 4)."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.link import DEFAULT_BLOCKS, blocks_for_rows
from pyg_direct.features.placement import run_op
from pyg_direct.features.tier import TableTier
from pyg_direct.features.unified_bytes import UnifiedBytes
from pyg_direct.features.unified_move import run_to
from pyg_direct.ops.check import INDEX_DTYPES, check_flag
from pyg_direct.runtime.advice import advise as advise_driver
from pyg_direct.runtime.device import bind_thread, resolve_device
from pyg_direct.runtime.memory import move
from pyg_direct.runtime.recycle import POOL
from pyg_direct.typing import Device


class MemAdvise(enum.IntEnum):
    """Advice on unified memory, with the names and numbers of CUDA's `cudaMemoryAdvise`."""

    cudaMemAdviseSetReadMostly = 1  # noqa: N815
    cudaMemAdviseUnsetReadMostly = 2  # noqa: N815
    cudaMemAdviseSetPreferredLocation = 3  # noqa: N815
    cudaMemAdviseUnsetPreferredLocation = 4  # noqa: N815
    cudaMemAdviseSetAccessedBy = 5  # noqa: N815
    cudaMemAdviseUnsetAccessedBy = 6  # noqa: N815


# Nothing else is known to run beside: twice what keeps the link busy.
_BLOCKS = 2 * DEFAULT_BLOCKS

_CPU = torch.device("cpu")


class UnifiedTensor(Tensor):
    """A tensor in unified memory (PyTorch-Direct, arXiv:2101.07956, section 4).

    Make one with `to_unified`, or with `torch` and `device="unified"`. The CPU and GPUs read it where it lies:
    `rows = unified[ids]`, with ids on a GPU, reads only these rows over the link. Operations run and leave their
    results by the rules of PyTorch-Direct, Table 3:

    | the other operands       | propagatedToCUDA, the default  | not propagatedToCUDA           |
    | ------------------------ | ------------------------------ | ------------------------------ |
    | a tensor on a GPU        | on the GPU, result on the GPU  | on the GPU, result on the GPU  |
    | a tensor on the CPU      | on the CPU, result unified     | on the CPU, result on the CPU  |
    | unified, scalars or none | on the GPU, result on the GPU  | on the CPU, result unified     |

    A tensor on the CPU without dimensions is a scalar. One unified operand with `propagatedToCUDA` suffices. Views,
    `clone` and `torch.*_like` stay unified, and an operation in place leaves its result where it is. Without a GPU
    everything is computed by the CPU, and all other results are CPU tensors. Gradients flow through indexing and `to`;
    other operations whose result leaves unified memory are for tensors without gradient. `device` is `cpu`, to autograd
    too: `.cpu()` makes a CPU tensor nevertheless.

    In ids on a GPU, numbers below 0 do not count from the end: what is out of range gives a row of zeros, and an
    `IdError` at the next use.

    Args:
        host: A CPU tensor over bytes of `memory`; see `to_unified`, which makes both.
        memory: What holds them.
        propagated: `propagatedToCUDA`.

    Example:
        >>> x = to_unified(torch.arange(8.0).view(4, 2))
        >>> x[torch.tensor([3, 0])].cpu().tolist()
        [[6.0, 7.0], [0.0, 1.0]]
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    host_view: Tensor
    memory: UnifiedBytes
    propagated: bool
    _on_gpu: Tensor | None
    _rows: TableTier | None

    @staticmethod
    def __new__(cls, host: Tensor, memory: UnifiedBytes, propagated: bool = True) -> UnifiedTensor:
        """A tensor over the bytes that `host` is a CPU view of."""
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=_CPU)  # fmt: skip
        made.host_view, made.memory, made.propagated = host, memory, propagated
        made._on_gpu = made._rows = None
        return made  # type: ignore[no-any-return]

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run_op(func, args, kwargs or {})

    def on_cpu(self, for_write: bool = False) -> Tensor:
        """This tensor as an ordinary CPU tensor, `[...]` of its dtype, over the same memory, once the GPU has done.

        Args:
            for_write: Wait for reads of the GPU too.
        """
        self.memory.wait(for_write)
        return self.host_view

    def on_gpu(self) -> Tensor:
        """This tensor as a CUDA tensor, `[...]` of its dtype, over the same memory, for the current stream.

        Raises:
            ArgumentError: no GPU reads it.
        """
        if self.memory.device is None:
            raise ArgumentError("on_gpu needs a GPU that reads the tensor, and none does")
        flat = self.memory.on_gpu()
        seen: Tensor | None = self._on_gpu
        if seen is None:
            host = self.host_view
            whole = flat[: len(flat) // host.itemsize * host.itemsize].view(host.dtype)
            seen = self._on_gpu = whole.as_strided(host.size(), host.stride(), host.storage_offset())
            if host.is_conj():
                seen = self._on_gpu = seen.conj()
        return seen

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `Tensor.to`. To `"cpu"` makes a CPU tensor, though `device` of unified tensors is that, too; what names
        no device leaves the result unified. The result is `[...]` as this one, in the dtype that is asked for.

        Raises:
            DeviceError: the name begins with `unified` and is that of no such device.
        """
        return run_to(self, *args, **kwargs)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """A CPU tensor of its own, `[...]` as this one and of its dtype.

        Args:
            memory_format: As of `Tensor.cpu`.
        """
        return self.to("cpu", memory_format=memory_format)

    @property
    def is_unified(self) -> bool:
        """True."""
        return True

    @property
    def propagatedToCUDA(self) -> bool:  # noqa: N802
        """Whether what is computed from it goes to the GPU where the rules leave that open."""
        return self.propagated

    def set_propagatedToCUDA(self, propagatedToCUDA: bool) -> None:  # noqa: N802, N803
        """Set whether what is computed from it goes to the GPU, see Table 3; views made earlier keep theirs.

        Args:
            propagatedToCUDA: Whether it does.
        """
        self.propagated = bool(propagatedToCUDA)

    def memAdvise(self, advise: MemAdvise | int | str, device: Device = None) -> None:  # noqa: N802
        """Advise the driver on the whole memory behind this tensor, as `cudaMemAdvise` does.

        Args:
            advise: One of `MemAdvise`, or its number or name, with or without `cudaMemAdvise` in front.
            device: The GPU, or `"cpu"`, that the advice is about; None is the GPU that reads the tensor.

        Raises:
            ArgumentError, ArgumentTypeError: no such advice, no such device, or memory that no GPU reads.
            DeviceError: the GPU is not there.
        """
        advice = _read_advice(advise)
        memory = self.memory
        if memory.device is None or memory.block.placement != "unified":
            raise ArgumentError(f"memAdvise needs memory that the driver manages, this is of kind "
                                f"{memory.block.placement!r}")  # fmt: skip
        target = resolve_device(memory.device if device is None else device)
        bind_thread(memory.device.index)
        advise_driver(memory.block.address, memory.block.num_bytes, advice.name.removeprefix("cudaMemAdvise"),
               -1 if target.type == "cpu" else target.index)  # fmt: skip

    @torch.compiler.disable
    def __getitem__(self, index: Any) -> Any:
        # A default device, or names of devices, would look at each of these calls.
        with torch._C.DisableTorchFunction():
            memory = self.memory
            is_ids = (type(index) is Tensor and index.get_device() == memory.gpu and index.dim() == 1
                      and index.dtype in INDEX_DTYPES)  # fmt: skip
            if is_ids:
                rows = self._rows
                if rows is None and self.host_view.is_contiguous() and self.dim() > 0:
                    rows = self._make_rows()
                if rows is not None:
                    if self.requires_grad and torch.is_grad_enabled():
                        return _Rows.apply(self, index)
                    memory.join()
                    return rows.take(index)
        return super().__getitem__(index)

    def read_rows(self, ids: Tensor) -> Tensor:
        """Rows of ids on the GPU, `[n, ...]` of its dtype there, without a gradient.

        Args:
            ids: int32 or int64 `[n]`, on the GPU that reads the tensor.

        Raises:
            IdError: an earlier read had an id out of range.
        """
        self.memory.join()
        return (self._rows or self._make_rows()).take(ids)

    def _make_rows(self) -> TableTier:
        """What reads rows over the link."""
        row_bytes = self.host_view.shape[1:].numel() * self.itemsize
        # A grid with a cap asks for whole rows, which is what the link serves best.
        self._rows = TableTier(self.on_gpu(), "unified", block=self.memory.block,
                               max_blocks=blocks_for_rows(_BLOCKS, row_bytes, row_bytes))  # fmt: skip
        return self._rows

    def numpy(self, *, force: bool = False) -> Any:
        """An array over the same memory.

        Args:
            force: As of `Tensor.numpy`.

        Raises:
            RuntimeError: the tensor requires a gradient, unless `force` is set.
        """
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.on_cpu(for_write=True).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy() if dtype is None else self.numpy().astype(dtype)
        return array.copy() if copy else array

    def tolist(self) -> Any:
        """Its numbers as nested lists."""
        return self.on_cpu().tolist()

    def data_ptr(self) -> int:
        """Address of its first number, for the CPU and GPUs alike."""
        return self.host_view.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(self.on_cpu().detach())
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>)" if self.grad_fn is not None else (
            ", requires_grad=True)" if self.requires_grad else ")")  # fmt: skip
        return f"{text[:-1]}, device='unified'{grad}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_unified, (self.on_cpu().detach().clone(), self.propagated, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnifiedTensor:
        made = rebuild_unified(self.on_cpu().detach(), self.propagated, self.requires_grad)
        memo[id(self)] = made
        return made

    def new_like(self, host: Tensor) -> UnifiedTensor:
        """A view of the same memory, `[...]` as `host` and of its dtype.

        Args:
            host: The view of the CPU, `[...]` of any dtype, over bytes of `memory`.
        """
        return UnifiedTensor(host, self.memory, self.propagated)


class _Rows(torch.autograd.Function):
    """Rows by id, with a dense gradient in unified memory."""

    @staticmethod
    def forward(ctx: Any, table: UnifiedTensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table.detach()
        return table.read_rows(ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        table: UnifiedTensor = ctx.table
        total = empty_unified(table.shape, table.dtype, table.memory.device, table.propagated)
        on_gpu = total.on_gpu().zero_()
        # Ids out of range were told by the forward pass, and must not reach a kernel of torch.
        known = (ids >= 0) & (ids < len(on_gpu))
        shape = (-1, *(1 for _ in on_gpu.shape[1:]))
        on_gpu.index_add_(0, torch.where(known, ids, 0), grads[0] * known.view(shape))
        total.memory.mark_written()
        return total, None


def _read_advice(value: MemAdvise | int | str) -> MemAdvise:
    try:
        if isinstance(value, str):
            return MemAdvise["cudaMemAdvise" + value.removeprefix("cudaMemAdvise")]
        return MemAdvise(value)
    except (KeyError, ValueError) as error:
        names = ", ".join(advice.name for advice in MemAdvise)
        raise ArgumentError(f"advise must be one of {names}, got {value!r}") from error


def gpu_for_unified(device: Device = None) -> torch.device | None:
    """The GPU that is to read unified memory: `device`, else the current one; None without GPUs."""
    if not torch.cuda.is_available():
        return None
    target = resolve_device(device)
    return target if target.type == "cuda" else None


def empty_unified(shape: Any, dtype: torch.dtype, device: torch.device | None, propagated: bool = True,
                  strides: Any = None) -> UnifiedTensor:  # fmt: skip
    """A unified tensor whose contents are undefined; its memory is recycled."""
    size = torch.Size(shape)
    strides = tuple(strides) if strides is not None else torch.empty(size, device="meta").stride()
    length = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True))
    block = POOL.take(max(1, length) * dtype.itemsize, device)
    host = block.view_on_cpu(dtype, (max(1, length),)).as_strided(size, strides)
    return UnifiedTensor(host, UnifiedBytes(block, device), propagated)


def to_unified(tensor: Tensor, *, propagatedToCUDA: bool = True, advise: MemAdvise | int | str | None = None,  # noqa: N803
               adviseDevice: Device = None, device: Device = None) -> UnifiedTensor:  # fmt: skip # noqa: N803
    """The tensor as a `UnifiedTensor`, as `to("unified")` of PyTorch-Direct.

    A CPU tensor is moved, not copied, where it lies contiguous: it becomes a view of the same memory, so that a large
    table is not held twice.

    Args:
        tensor: `[...]` of any dtype, dense, on the CPU or on a GPU (which is copied).
        propagatedToCUDA: See `UnifiedTensor`.
        advise, adviseDevice: See `UnifiedTensor.memAdvise`; by default memory stays on the host, mapped into the GPU.
        device: The GPU that reads it; None is the current one.

    Returns:
        The same `[...]`, of the same dtype; `tensor` itself where it is unified already.

    Raises:
        MemoryLimitError: host memory does not hold it.
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"tensor must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ArgumentTypeError(f"tensor must be dense, got layout {tensor.layout}")
    propagatedToCUDA = check_flag("propagatedToCUDA", propagatedToCUDA)  # noqa: N806
    if advise is not None:
        _read_advice(advise)
    if isinstance(tensor, UnifiedTensor):
        made = tensor
    else:
        made = _move_or_copy(tensor.detach().resolve_conj().resolve_neg(), tensor, propagatedToCUDA,
                             gpu_for_unified(tensor.device if tensor.is_cuda else device))  # fmt: skip
        made.requires_grad_(tensor.requires_grad)
    if advise is not None:
        made.memAdvise(advise, adviseDevice)
    return made


def _move_or_copy(plain: Tensor, source: Tensor, propagated: bool, gpu: torch.device | None) -> UnifiedTensor:
    is_whole = (not plain.is_cuda and plain.is_contiguous() and plain.numel() > 0 and not source.requires_grad
                and plain.untyped_storage().nbytes() == plain.numel() * plain.itemsize)  # fmt: skip
    if is_whole and gpu is not None and plain.data_ptr() == source.data_ptr():
        del plain
        block = move(source, "unified", gpu, what="unified tensor")
        return UnifiedTensor(block.view_on_cpu(source.dtype, source.shape), UnifiedBytes(block, gpu), propagated)
    made = empty_unified(source.shape, source.dtype, gpu, propagated)
    made.host_view.copy_(plain)
    return made


def rebuild_unified(host: Tensor, propagated: bool, requires_grad: bool) -> UnifiedTensor:
    """A unified tensor from its pickled parts."""
    made = empty_unified(host.shape, host.dtype, gpu_for_unified(), propagated)
    made.host_view.copy_(host)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


_Register = getattr(torch.serialization, "add_safe_globals", None)
if _Register is not None:
    _Register([rebuild_unified])
