"""Norms that look at all nodes of a batch together."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch_geometric.nn import norm


def find_norm_over_nodes(model: torch.nn.Module) -> str | None:
    """The first module of a model that would see nodes that fill places left over, and its name; None without one."""
    for name, module in model.named_modules():
        if _mixes_rows(module):
            return f"{type(module).__name__} at {name!r}"
    return None


def _mixes_rows(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.LayerNorm):
        return False
    if isinstance(module, norm.LayerNorm):
        return bool(module.mode == "graph")
    return isinstance(module, _NormBase) or type(module).__module__.startswith("torch_geometric.nn.norm")
