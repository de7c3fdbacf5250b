"""What structures that are made of several tensors have in common: their bytes, and copies of them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from torch import Tensor

_Self = TypeVar("_Self", bound="Arrays")


class Arrays:
    """Base of dataclasses some of whose fields are tensors."""

    def list_arrays(self) -> dict[str, Tensor]:
        """The tensors, by field."""
        values = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays."""
        return sum(t.numel() * t.element_size() for t in self.list_arrays().values())

    def copy_arrays(self: _Self, copy: Callable[[Tensor], Tensor]) -> _Self:
        """The same of copies of all tensors."""
        return cast(_Self, replace(cast(Any, self), **{n: copy(tensor) for n, tensor in self.list_arrays().items()}))
