"""Tensors of a snapshot that carry their origin, and tensors that are copied to the GPU only when read.

A layer that gets them asks `find_tag` for their snapshot, and then needs neither edges nor features itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyg_direct.runtime.host.tensor_views import ordinary_tensors

_NAME = "_pyg_direct_tag"


class Tag:
    """Origin of a tensor: snapshot `time` of `plan`, as `role` "x", "edge_index" or "edge_weight"."""

    def __init__(self, plan: Any, time: int, role: str, version: int) -> None:
        self.plan, self.time, self.role, self.version = plan, time, role, version

    def __deepcopy__(self, memo: Any) -> Tag:
        # A copy is a separate tensor, which may be written to.
        return Tag(None, -1, "", -1)

    def __reduce__(self) -> tuple[Any, ...]:
        # A type that `torch.load` reads by default, also in programs without this package.
        return OrderedDict, ()


def tag(tensor: Tensor, plan: Any, time: int, role: str) -> Tensor:
    """Mark a tensor as part of a snapshot, as long as it is not written to."""
    setattr(tensor, _NAME, Tag(plan, time, role, tensor._version))
    return tensor


def find_tag(tensor: Any, role: str) -> Tag | None:
    """Return the origin of a tensor; None for any other, and for one that was written to or requires gradients."""
    found = getattr(tensor, _NAME, None)
    # Saved tensors come back as other objects.
    if not isinstance(found, Tag) or found.plan is None or found.role != role:
        return None
    return None if tensor.requires_grad or was_written(tensor) else found


def was_written(tensor: Any) -> bool:
    """Report whether a tensor was written to since it was marked."""
    found: Tag = getattr(tensor, _NAME)
    return bool(tensor._version != found.version or getattr(tensor, "is_written", False))


class LazyTensor(Tensor):
    """A tensor of known shape whose numbers are fetched when an operation reads them, then kept while it lives.

    It has no memory of its own. A request for its storage raises an error of torch, and a request for its address gives
    the address of the fetched tensor. Results of operations are ordinary tensors.
    """

    _written: bool
    _load: Callable[[], Tensor]
    _loaded: Tensor | None
    _version_loaded: int

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, load: Callable[[], Tensor]) -> LazyTensor:  # noqa: D102
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=device
        )
        made._load, made._loaded, made._written, made._version_loaded = load, None, False, 0
        return made

    def __init__(self, like: Tensor, device: torch.device, load: Callable[[], Tensor]) -> None:
        pass

    # Operations reach `__torch_dispatch__`, below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def load(self) -> Tensor:
        """Return the ordinary tensor; fetched once."""
        if self._loaded is None:
            # Tensors of `torch.inference_mode` do not count writes.
            with ordinary_tensors():
                self._loaded = self._load()
            self._version_loaded = self._loaded._version
        return self._loaded

    @ordinary_tensors()
    def renew(self) -> LazyTensor:
        """Return another tensor of the same numbers and origin, which has fetched nothing."""
        made = LazyTensor(self, self.device, self._load)
        known = getattr(self, _NAME, None)
        if isinstance(known, Tag):
            tag(made, known.plan, known.time, known.role)
        return made

    @property
    def is_written(self) -> bool:
        """Report whether it was written to."""
        return self._written or (self._loaded is not None and self._loaded._version != self._version_loaded)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (),  # type: ignore[override]
                           kwargs: Any = None) -> Any:  # fmt: skip
        """Run the operation on the fetched tensor."""
        if func._schema.is_mutable:
            for value in pytree.tree_leaves((args, kwargs or {})):
                if isinstance(value, LazyTensor):
                    value._written = True
        fetch = lambda value: value.load() if isinstance(value, LazyTensor) else value  # noqa: E731
        args, kwargs = pytree.tree_map(fetch, (args, kwargs or {}))
        return func(*args, **kwargs)

    def tolist(self) -> Any:
        """Return the list of the ordinary tensor."""
        return self.load().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the array of the ordinary tensor."""
        return self.load().numpy(force=force)

    # Code of torch below its operations would find no memory.

    def share_memory_(self) -> Tensor:
        """Return the ordinary tensor, moved to shared memory."""
        return self.load().share_memory_()

    def apply_(self, function: Callable[[Any], Any]) -> LazyTensor:
        """Apply a function to the ordinary tensor."""
        self.load().apply_(function)  # type: ignore[no-untyped-call]
        self._written = True
        return self

    def data_ptr(self) -> int:
        """Return the address of the ordinary tensor."""
        return self.load().data_ptr()

    def __dlpack__(self, **options: Any) -> Any:
        return self.load().__dlpack__(**options)

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.load().__cuda_array_interface__

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.load().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.load().__reduce_ex__(protocol)
