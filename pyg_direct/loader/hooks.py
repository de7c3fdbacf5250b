"""PyG's hooks, which a class that a program derives from a loader of ours may say anew."""

from __future__ import annotations

from typing import Any

_ROOMS = ("pyg_direct", "torch_geometric")


def is_said_anew(loader: Any, hook: str) -> bool:
    """Whether the class of a loader has a hook that is neither ours nor PyG's."""
    method = getattr(type(loader), hook, None)
    return method is not None and method.__module__.partition(".")[0] not in _ROOMS


def check_hooks(loader: Any) -> None:
    """Batches are sampled ahead, several of them at a time, and not by `collate_fn`.

    Raises:
        NotImplementedError: the class has a `collate_fn` of its own.
    """
    if is_said_anew(loader, "collate_fn"):
        raise NotImplementedError(f"collate_fn of {type(loader).__qualname__} would not be called, as batches are "
                                  "sampled ahead; say what it does to them in filter_fn, transform or "
                                  "transform_sampler_output, or derive the class from PyG's loader")  # fmt: skip
