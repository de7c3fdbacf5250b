"""PyG's hooks, which a class that a program derives from a loader of ours, or the program, may replace."""

from __future__ import annotations

from typing import Any

_ROOMS = ("pyg_direct", "torch_geometric", "torch")


def is_said_anew(loader: Any, hook: str) -> bool:
    """Whether a loader has a hook that is neither ours nor PyG's, by its class or of its own."""
    method = loader.__dict__.get(hook)
    if method is None:
        method = getattr(type(loader), hook, None)
    return method is not None and not _is_ours(method)


def _is_ours(method: Any) -> bool:
    """Whether a function stands in a file of ours, PyG's or torch's: what wraps one may bear its name and module."""
    function = getattr(method, "__func__", method)
    names = getattr(function, "__globals__", None)
    module = type(function).__module__ if names is None else names["__name__"]
    return module.partition(".")[0] in _ROOMS


def check_hooks(loader: Any) -> None:
    """Batches are sampled ahead, several of them at a time, and not by `collate_fn`, as ShaDow's is called too.

    Raises:
        NotImplementedError: the class, or the loader, has a `collate_fn` of its own.
    """
    for hook in ("collate_fn", "__collate__"):
        if is_said_anew(loader, hook):
            raise NotImplementedError(f"{hook} of {type(loader).__qualname__} would not be called, as batches are "
                                      "sampled ahead; say what it does to them in filter_fn, transform or "
                                      "transform_sampler_output, or derive the class from PyG's loader")  # fmt: skip
