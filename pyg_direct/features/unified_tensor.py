"""`UnifiedTensor`: a tensor in host memory that the CPU and GPUs read in place (PyTorch-Direct, section 4).

`choose_place` chooses the device that runs an operation on unified tensors, and the memory of its result; it is Table 3
of PyTorch-Direct as code. `run_to` serves `Tensor.to`, from a unified tensor to other memory or back.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError
from pyg_direct.features.tiers.in_memory import HostTier
from pyg_direct.ops.argument_checks import INDEX_DTYPES, check_flag
from pyg_direct.ops.rows.gather_rows import DEFAULT_BLOCKS, blocks_for_rows
from pyg_direct.runtime.cuda.device import advise as advise_driver, bind_thread, resolve_device
from pyg_direct.runtime.cuda.memory import POOL, UnifiedBytes, move
from pyg_direct.runtime.host.tensor_views import as_bytes
from pyg_direct.typing import Device

aten = torch.ops.aten


class Place(NamedTuple):
    """Device of an operation and memory of its result: `cuda`, `unified` or `cpu`."""

    compute: str
    result: str


# (the other operands, propagatedToCUDA) -> place.
RULES = {("cuda", True): Place("cuda", "cuda"), ("cuda", False): Place("cuda", "cuda"),
         ("cpu", True): Place("cpu", "unified"), ("cpu", False): Place("cpu", "cpu"),
         ("none", True): Place("cuda", "cuda"), ("none", False): Place("cpu", "unified")}  # fmt: skip
# They make a tensor like the given one, or copy it.
_LIKE = {aten.clone, aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like,
         aten.randint_like, aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones,
         aten.new_full}  # fmt: skip


@functools.cache
def _is_view(func: Any) -> bool:
    return func.overloadpacket is aten._unsafe_view or any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments that an operation writes."""
    return tuple((n, a.name) for n, a in enumerate(func._schema.arguments)
                 if a.alias_info is not None and a.alias_info.is_write)  # fmt: skip


# Compiled programs call it as it is, between their graphs.
@torch.compiler.disable
def run_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with at least one unified tensor among its arguments."""
    cls = UnifiedTensor
    packet = func.overloadpacket
    if packet in (aten._to_copy, aten.copy_) or packet in _LIKE:
        return _make_copy(func, packet, args, kwargs)
    if packet in (aten.is_pinned, aten._pin_memory):
        return False if packet is aten.is_pinned else args[0]
    flat = tree_flatten((args, kwargs))[0]
    tables = [value for value in flat if isinstance(value, cls)]
    if _is_view(func):
        made = func(*tree_map(lambda v: v.host_view if isinstance(v, cls) else v, args), **kwargs)
        return tree_map(lambda v: tables[0].new_like(v) if isinstance(v, Tensor) else v, made)
    written = [args[n] if n < len(args) else kwargs.get(name) for n, name in _written(func)]
    place = choose_place(tables, [v for v in flat if isinstance(v, Tensor) and not isinstance(v, cls)], written)
    return _compute(func, args, kwargs, place, [value for value in written if isinstance(value, Tensor)])


def choose_place(tables: list[Any], others: list[Tensor], written: list[Any]) -> Place:
    """Choose the device of an operation and the memory of its result.

    Args:
        written: Tensors that the operation writes, if any.
    """
    gpu = next((table.memory.device for table in tables), None)
    if any(other.is_cuda for other in others):
        kind = "cuda"
    else:
        kind = "cpu" if any(other.dim() > 0 for other in others) else "none"
    place = RULES[kind, any(table.propagated for table in tables)]
    if any(type(value) is Tensor and not value.is_cuda for value in written):
        place = Place("cpu", place.result)
    if gpu is None or any(table.memory.device is None for table in tables):
        place = Place("cpu", "cpu")
    return place


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, written: list[Tensor]) -> Any:
    cls = UnifiedTensor
    seen: dict[int, Any] = {}
    source: Any = None

    def place_operand(value: Any) -> Any:
        nonlocal source
        if isinstance(value, cls):
            source = value if source is None else source
            is_written = any(value is one for one in written)
            plain = value.on_gpu() if place.compute == "cuda" else value.on_cpu(is_written)
            if is_written:
                seen[id(plain)] = value
                if place.compute == "cuda":
                    value.memory.mark_written()
            return plain
        return value

    args, kwargs = tree_map(place_operand, (args, kwargs))
    made = func(*args, **kwargs)

    def place_result(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, cls):
            return value
        if id(value) in seen:
            return seen[id(value)]
        if any(value is one for one in written):
            return value
        if place.result == "unified":
            return _copy_to_unified(value, source)
        return value

    return tree_map(place_result, made)


def _copy_to_unified(value: Tensor, source: Any) -> Any:
    made = empty_unified(value.shape, value.dtype, source.memory.device, source.propagated,
                                    value.stride())  # fmt: skip
    made.host_view.copy_(value)
    return made


def _make_copy(func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if packet is aten.copy_:
        return run_copy(args[0], args[1])
    source = args[0]
    wanted = kwargs.get("device")
    wanted = None if wanted is None else torch.device(wanted)
    if packet is aten._to_copy:
        dtype = kwargs.get("dtype") or source.dtype
        if wanted is not None and wanted.type == "cuda":
            made = torch.empty(source.shape, dtype=source.dtype, device=wanted)
            return run_copy(made, source).to(dtype)
        if wanted is not None and wanted.type == "cpu":
            return source.on_cpu().to(dtype=dtype, copy=True)
        return run_copy(empty_unified(source.shape, dtype, source.memory.device, source.propagated), source)
    if wanted is not None and wanted.type in ("cpu", "cuda"):
        plain = source.on_gpu() if wanted.type == "cuda" and source.memory.device else source.on_cpu()
        return func(plain, *args[1:], **kwargs)
    # A tensor like a unified one is unified too: made by the CPU, in memory that is recycled.
    plain_kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    if packet is aten.clone:
        made = empty_unified(source.shape, source.dtype, source.memory.device, source.propagated,
                                     torch.empty_like(source.host_view, device="meta", **kwargs).stride())  # fmt: skip
        return run_copy(made, source)
    like = func(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"), *args[1:],
                **plain_kwargs)  # fmt: skip
    made = empty_unified(like.shape, like.dtype, source.memory.device, source.propagated, like.stride())
    return _fill_like(packet, made, args, kwargs)


def _fill_like(packet: Any, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    host = made.host_view
    fillers: dict[Any, Callable[[], Any]] = {
        aten.zeros_like: lambda: host.zero_(), aten.new_zeros: lambda: host.zero_(),
        aten.ones_like: lambda: host.fill_(1), aten.new_ones: lambda: host.fill_(1),
        aten.full_like: lambda: host.fill_(args[1]), aten.new_full: lambda: host.fill_(args[2]),
        aten.rand_like: lambda: host.uniform_(), aten.randn_like: lambda: host.normal_(),
        aten.randint_like: lambda: host.random_(*args[1:])}  # fmt: skip
    if packet in fillers:
        fillers[packet]()
    return made


def run_copy(target: Any, source: Any) -> Any:
    """Run `target.copy_(source)`, one unified, by a kernel: the driver copies slowly out of managed memory."""
    cls = UnifiedTensor
    if isinstance(target, cls):
        if source.is_cuda and target.memory.device is not None:
            target.on_gpu().copy_(source)
            target.memory.mark_written()
        else:
            target.on_cpu(for_write=True).copy_(source.on_cpu() if isinstance(source, cls) else source)
        return target
    if not target.is_cuda or source.memory.device is None:
        target.copy_(source.on_cpu())
        return target
    seen = source.on_gpu()
    is_alike = (seen.device, seen.dtype, seen.shape) == (target.device, target.dtype, target.shape)
    if is_alike and seen.is_contiguous() and target.is_contiguous():
        alignment = seen.data_ptr() | target.data_ptr() | seen.numel() * seen.itemsize
        units = torch.int64, torch.int32, torch.int16, torch.uint8
        unit = next(unit for unit in units if alignment % unit.itemsize == 0)
        if seen.numel() > 0:
            words = _as_words(seen, unit)
            torch.bitwise_or(words, 0, out=_as_words(target, unit))
        return target
    target.copy_(seen)
    return target


def _as_words(tensor: Tensor, unit: torch.dtype) -> Tensor:
    return as_bytes(tensor).view(unit)


NAME = "unified"
# Names of the device, and the `propagatedToCUDA` that each gives.
_HINTS = {NAME: None, f"{NAME}:0": True, f"{NAME}:1": False}


def read_hint(name: str) -> bool | None:
    """Return the `propagatedToCUDA` that a name of the device gives, or None."""
    if name not in _HINTS:
        raise DeviceError(f"device must be one of {', '.join(_HINTS)}, got {str(name)!r}")
    return _HINTS[name]


# Compiled programs call it as it is, between their graphs.
@torch.compiler.disable
def run_to(source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run `source.to(...)`, in any of its forms, if `source` is unified or the arguments name a unified target."""
    if source.layout is not torch.strided:
        raise DeviceError(f"device={NAME!r} needs a strided tensor, got one of layout {source.layout}")
    target, args, kwargs = _read_target(args, kwargs)
    # Torch parses its arguments and determines the result.
    before = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    after = before.to(*args, **kwargs)
    cls = UnifiedTensor
    is_unified = isinstance(source, cls)
    if isinstance(target, torch.device):
        made = Tensor.to(source, target, after.dtype, copy=True)
        wanted = kwargs.get("memory_format") or torch.preserve_format
        return made if wanted is torch.preserve_format else made.contiguous(memory_format=wanted)
    hint = target.propagated if isinstance(target, cls) else target
    hint = hint if hint is not None else not is_unified or source.propagated  # type: ignore[attr-defined]
    if is_unified and after is before and hint == source.propagated:  # type: ignore[attr-defined]
        return source
    strides = torch.empty_like(after).stride()
    if torch.is_grad_enabled() and source.requires_grad and (after.is_floating_point() or after.is_complex()):
        made = source if source.dtype == after.dtype else Tensor.to(source, after.dtype)
        return _Move.apply(made, strides, hint)  # type: ignore[no-any-return]
    return _copy(source, after.dtype, strides, hint)


def _read_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the target, and the arguments with torch's `meta` for it: a device, a unified tensor or a hint."""
    kwargs = dict(kwargs)
    first = args[0] if args else kwargs.pop("tensor", None)
    rest = args[1:]
    if first is None and "device" in kwargs:
        first = kwargs.pop("device")
    if first is None or isinstance(first, torch.dtype):
        return None, args, kwargs
    if isinstance(first, Tensor):
        target = first if isinstance(first, UnifiedTensor) else first.device
        return target, ("meta", first.dtype, *rest), kwargs
    if isinstance(first, str) and first.startswith(NAME):
        return read_hint(first), ("meta", *rest), kwargs
    return torch.device(first), ("meta", *rest), kwargs


def _copy(source: Any, dtype: torch.dtype, strides: Any, hint: bool) -> Any:
    if isinstance(source, UnifiedTensor):
        gpu = source.memory.device
    else:
        gpu = gpu_for_unified(source.device if source.is_cuda else None)
    return run_copy(empty_unified(source.shape, dtype, gpu, hint, strides), source)


class _Move(torch.autograd.Function):
    """Copy in unified memory; its gradient returns to the memory of the source tensor."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, strides: Any, hint: bool) -> Tensor:
        ctx.device = None if isinstance(source, UnifiedTensor) else source.device
        return _copy(source, source.dtype, strides, hint)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] if ctx.device is None else grads[0].to(ctx.device), None, None


class MemAdvise(enum.IntEnum):
    """Advice on unified memory, with the names and numbers of CUDA's `cudaMemoryAdvise`.

    Example:
        >>> MemAdvise(3)  # as in `to_unified(x, advise=3)` on a machine with a GPU
        <MemAdvise.cudaMemAdviseSetPreferredLocation: 3>
    """

    cudaMemAdviseSetReadMostly = 1  # noqa: N815
    cudaMemAdviseUnsetReadMostly = 2  # noqa: N815
    cudaMemAdviseSetPreferredLocation = 3  # noqa: N815
    cudaMemAdviseUnsetPreferredLocation = 4  # noqa: N815
    cudaMemAdviseSetAccessedBy = 5  # noqa: N815
    cudaMemAdviseUnsetAccessedBy = 6  # noqa: N815


# No other work is known to run beside it: twice the blocks that keep the link busy.
_BLOCKS = 2 * DEFAULT_BLOCKS

_CPU = torch.device("cpu")


class UnifiedTensor(Tensor):
    """A tensor in unified memory (PyTorch-Direct, arXiv:2101.07956, section 4).

    Make one with `to_unified`, or with `torch` and `device="unified"`. The CPU and GPUs read it in place:
    `rows = unified[ids]`, with ids on a GPU, reads only these rows over the link. The rules of PyTorch-Direct, Table 3,
    give the device of an operation and the memory of its result:

    +--------------------------+-------------------------------+-------------------------------+
    | the other operands       | propagatedToCUDA (default)    | not propagatedToCUDA          |
    +==========================+===============================+===============================+
    | a tensor on a GPU        | on the GPU, result on the GPU | on the GPU, result on the GPU |
    +--------------------------+-------------------------------+-------------------------------+
    | a tensor on the CPU      | on the CPU, result unified    | on the CPU, result on the CPU |
    +--------------------------+-------------------------------+-------------------------------+
    | unified, scalars or none | on the GPU, result on the GPU | on the CPU, result unified    |
    +--------------------------+-------------------------------+-------------------------------+

    A tensor on the CPU without dimensions is a scalar. One unified operand with `propagatedToCUDA` suffices. Views,
    `clone` and `torch.*_like` stay unified, and an operation in place leaves its result in place. Without a GPU the CPU
    computes every result, and all other results are CPU tensors. Gradients flow through indexing and `to`; other
    operations whose result leaves unified memory are for tensors without gradient. `device` is `cpu`, also for
    autograd; nevertheless `.cpu()` makes a CPU tensor.

    In ids on a GPU, numbers below 0 do not count from the end. An id out of range gives a row of zeros, and an
    `IdError` at the next use.

    Args:
        host: A CPU tensor over bytes of `memory`; see `to_unified`, which makes both.
        memory: Owner of the bytes.
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
    _rows: HostTier | None

    @staticmethod
    def __new__(cls, host: Tensor, memory: UnifiedBytes, propagated: bool = True) -> UnifiedTensor:
        """Return a tensor over the bytes that `host` is a CPU view of."""
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
        """Return this tensor as an ordinary CPU tensor, `[...]` of its dtype, over the same memory, after the GPU has
        finished.

        Args:
            for_write: Wait for reads of the GPU too.
        """
        self.memory.wait(for_write)
        return self.host_view

    def on_gpu(self) -> Tensor:
        """Return this tensor as a CUDA tensor, `[...]` of its dtype, over the same memory, for the current stream.

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
        """Convert as `Tensor.to` does. `"cpu"` makes a CPU tensor, although `device` of unified tensors is `cpu` too;
        arguments without a device leave the result unified. The result is `[...]` as this one, in the requested dtype.

        Raises:
            DeviceError: the name begins with `unified` and names no such device.
        """
        return run_to(self, *args, **kwargs)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """Return a separate CPU tensor, `[...]` as this one and of its dtype.

        Args:
            memory_format: As in `Tensor.cpu`.
        """
        return self.to("cpu", memory_format=memory_format)

    @property
    def is_unified(self) -> bool:
        """True."""
        return True

    @property
    def propagatedToCUDA(self) -> bool:  # noqa: N802
        """Report whether results go to the GPU if the rules leave that open."""
        return self.propagated

    def set_propagatedToCUDA(self, propagatedToCUDA: bool) -> None:  # noqa: N802, N803
        """Set whether results go to the GPU, see Table 3; earlier views keep their setting.

        Args:
            propagatedToCUDA: True for results on the GPU.
        """
        self.propagated = bool(propagatedToCUDA)

    def memAdvise(self, advise: MemAdvise | int | str, device: Device = None) -> None:  # noqa: N802
        """Advise the driver on the whole memory behind this tensor, as `cudaMemAdvise` does.

        Args:
            advise: One of `MemAdvise`, or its number or name, with or without `cudaMemAdvise` in front.
            device: The GPU, or `"cpu"`, that the advice is about; None is the GPU that reads the tensor.

        Raises:
            ArgumentError, ArgumentTypeError: unknown advice, unknown device, or memory that no GPU reads.
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
        # A default device, or names of devices, would inspect each of these calls.
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
        """Return rows of ids on the GPU, `[n, ...]` of its dtype there, without a gradient.

        Args:
            ids: int32 or int64 `[n]`, on the GPU that reads the tensor.

        Raises:
            IdError: an earlier read had an id out of range.
        """
        self.memory.join()
        return (self._rows or self._make_rows()).take(ids)

    def _make_rows(self) -> HostTier:
        """Make the tier that reads rows over the link."""
        row_bytes = self.host_view.shape[1:].numel() * self.itemsize
        # A grid with a cap requests whole rows, which the link serves best.
        self._rows = HostTier(self.on_gpu(), self.memory.block, blocks_for_rows(_BLOCKS, row_bytes, row_bytes))
        return self._rows

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array over the same memory.

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
        """Return its numbers as nested lists."""
        return self.on_cpu().tolist()

    def data_ptr(self) -> int:
        """Return the address of its first number, for the CPU and GPUs alike."""
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
        """Return a view of the same memory, `[...]` as `host` and of its dtype.

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
        # The forward pass has reported ids out of range; they must not reach a torch kernel.
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
    """Return the GPU that reads unified memory: `device`, or the current one if None; None without GPUs."""
    if not torch.cuda.is_available():
        return None
    target = resolve_device(device)
    return target if target.type == "cuda" else None


def empty_unified(shape: Any, dtype: torch.dtype, device: torch.device | None, propagated: bool = True,
                  strides: Any = None) -> UnifiedTensor:  # fmt: skip
    """Allocate a unified tensor whose contents are undefined; its memory is recycled."""
    size = torch.Size(shape)
    strides = tuple(strides) if strides is not None else torch.empty(size, device="meta").stride()
    length = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True))
    block = POOL.take(max(1, length) * dtype.itemsize, device)
    host = block.view_on_cpu(dtype, (max(1, length),)).as_strided(size, strides)
    return UnifiedTensor(host, UnifiedBytes(block, device), propagated)


def to_unified(tensor: Tensor, *, propagatedToCUDA: bool = True, advise: MemAdvise | int | str | None = None,  # noqa: N803
               adviseDevice: Device = None, device: Device = None) -> UnifiedTensor:  # fmt: skip # noqa: N803
    """Convert a tensor to a `UnifiedTensor`, as `to("unified")` of PyTorch-Direct does.

    A contiguous CPU tensor is moved, not copied: it becomes a view of the same memory, so that a large table is not
    held twice.

    Args:
        tensor: `[...]` of any dtype, dense, on the CPU or on a GPU (which is copied).
        propagatedToCUDA: See `UnifiedTensor`.
        advise, adviseDevice: See `UnifiedTensor.memAdvise`; by default memory stays on the host, mapped into the GPU.
        device: The GPU that reads it; None is the current one.

    Returns:
        The same `[...]`, of the same dtype; `tensor` itself if it is unified already.

    Raises:
        MemoryLimitError: host memory does not hold it.
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.

    Example:
        >>> x = to_unified(torch.arange(8.0).view(4, 2))
        >>> x.is_unified, x[torch.tensor([3, 0])].cpu().tolist()
        (True, [[6.0, 7.0], [0.0, 1.0]])
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
    """Rebuild a unified tensor from its pickled parts."""
    made = empty_unified(host.shape, host.dtype, gpu_for_unified(), propagated)
    made.host_view.copy_(host)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


_Register = getattr(torch.serialization, "add_safe_globals", None)
if _Register is not None:
    _Register([rebuild_unified])
