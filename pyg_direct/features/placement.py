"""Where operations on unified tensors run, and where their results lie: Table 3 of PyTorch-Direct as code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from pyg_direct.runtime.raw import as_bytes

aten = torch.ops.aten


class Place(NamedTuple):
    """Where an operation runs and where its result goes: `cuda`, `unified` or `cpu`."""

    compute: str
    result: str


# (the other operands, propagatedToCUDA) -> place.
RULES = {("cuda", True): Place("cuda", "cuda"), ("cuda", False): Place("cuda", "cuda"),
         ("cpu", True): Place("cpu", "unified"), ("cpu", False): Place("cpu", "cpu"),
         ("none", True): Place("cuda", "cuda"), ("none", False): Place("cpu", "unified")}  # fmt: skip
# They make what is like the tensor they are given, or copy it.
_LIKE = {aten.clone, aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like,
         aten.randint_like, aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones,
         aten.new_full}  # fmt: skip


@functools.cache
def unified_tensors() -> Any:
    """The file of the class, which imports this one."""
    from pyg_direct.features import unified

    return unified


@functools.cache
def _is_view(func: Any) -> bool:
    return func.overloadpacket is aten._unsafe_view or any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operation writes."""
    return tuple((n, a.name) for n, a in enumerate(func._schema.arguments)
                 if a.alias_info is not None and a.alias_info.is_write)  # fmt: skip


# Compiled programs call it as it is, between their graphs.
@torch.compiler.disable
def run_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation with at least one unified tensor among its arguments."""
    unified = unified_tensors()
    cls = unified.UnifiedTensor
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
    """Where an operation runs and its result goes.

    Args:
        tables: The unified operands.
        others: The other tensors.
        written: What the operation writes, where anything.
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
    unified = unified_tensors()
    cls = unified.UnifiedTensor
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
    made = unified_tensors().empty_unified(value.shape, value.dtype, source.memory.device, source.propagated,
                                    value.stride())  # fmt: skip
    made.host_view.copy_(value)
    return made


def _make_copy(func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    unified = unified_tensors()
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
        return run_copy(unified.empty_unified(source.shape, dtype, source.memory.device, source.propagated), source)
    if wanted is not None and wanted.type in ("cpu", "cuda"):
        plain = source.on_gpu() if wanted.type == "cuda" and source.memory.device else source.on_cpu()
        return func(plain, *args[1:], **kwargs)
    # What is like a unified tensor is one: made by the CPU, into memory that is recycled.
    plain_kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    if packet is aten.clone:
        made = unified.empty_unified(source.shape, source.dtype, source.memory.device, source.propagated,
                                     torch.empty_like(source.host_view, device="meta", **kwargs).stride())  # fmt: skip
        return run_copy(made, source)
    like = func(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"), *args[1:],
                **plain_kwargs)  # fmt: skip
    made = unified.empty_unified(like.shape, like.dtype, source.memory.device, source.propagated, like.stride())
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
    """`target.copy_(source)`, one of them unified; over the link by a kernel, as the driver's own copy out of managed
    memory is slow.
    """
    cls = unified_tensors().UnifiedTensor
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
