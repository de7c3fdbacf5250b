"""PyG's `model.inference(loader)`, done by ours where the loader is one of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.loader.inference import check_inference_loader, infer
from pyg_direct.loader.neighbor import NeighborLoader
from pyg_direct.noedit.standin import show_batch


def make_inference(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method to put in the place of `BasicGNN.inference`; what ours cannot do is left to `original`."""

    @wraps(original)
    def inference(model: Any, loader: Any, device: Any = None, embedding_device: Any = "cpu",
                  progress_bar: bool = False, cache: bool = False) -> Tensor:  # fmt: skip
        if not _is_ours(model, loader, device):
            return original(model, loader, device, embedding_device, progress_bar, cache)
        return infer(model, loader, progress_bar=progress_bar).to(embedding_device)

    return inference


def _is_ours(model: Any, loader: Any, device: Any) -> bool:
    if not isinstance(loader, NeighborLoader) or model.training or model.jk_mode not in (None, "last"):
        return False
    places = {parameter.device for parameter in model.parameters()}
    places |= set() if device is None else {torch.empty(0, device=device).device}
    transform = loader.transform
    is_bare = transform is None or (isinstance(transform, partial) and transform.func is show_batch
                                    and transform.args == (None,))  # fmt: skip
    if places - {loader.device} or not is_bare or not isinstance(getattr(loader.data, "x", None), Tensor):
        return False
    try:
        check_inference_loader(loader)
    except ArgumentError:
        return False
    return True
