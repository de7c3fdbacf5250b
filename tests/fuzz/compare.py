"""Batches beside what is expected of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def assert_equal(what: str, got: Any, expected: Any) -> None:
    """Equal in every item, and in dtype and shape where both are tensors."""
    if isinstance(got, Tensor):
        assert got.is_contiguous() or got.dim() > 1, what
        if isinstance(expected, Tensor):
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape), f"{what}: {got.dtype} {got.shape}"
            assert torch.equal(got.cpu(), expected.cpu()), f"{what}: {got.tolist()}, expected {expected.tolist()}"
            return
        assert got.dtype == torch.int64 or not isinstance(expected, list), f"{what}: {got.dtype}"
        got = got.tolist()
    assert got == expected, f"{what}: {got}, expected {expected}"


def assert_store(what: str, store: Any, expected: dict[str, Any]) -> None:
    """A store of a batch has these attributes and no others; None stands for one that may be missing."""
    found = {key: value for key, value in store.items() if value is not None}
    wanted = {key: value for key, value in expected.items() if value is not None}
    assert found.keys() == wanted.keys(), f"{what}: {sorted(found)}, expected {sorted(wanted)}"
    for key, value in wanted.items():
        assert_equal(f"{what}.{key}", found[key], value)


@contextmanager
def full_products() -> Iterator[None]:
    """Recurrent layers on a GPU multiply all bits of float32, as all other layers do unless asked."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextmanager
def deterministic(is_on: bool = True) -> Iterator[None]:
    """Ask torch for equal results, where it has such a form: of several loops PyG keeps any on a GPU otherwise."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_on, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
