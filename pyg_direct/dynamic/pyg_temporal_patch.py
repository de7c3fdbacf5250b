"""PyTorch Geometric Temporal's recurrent layers replaced by accelerated ones under their own names, for unedited
programs.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from pyg_direct.dynamic import nn
from pyg_direct.errors import needs_extra

_PACKAGE = "torch_geometric_temporal"
_replaced: list[tuple[ModuleType, str, Any]] = []


def patch() -> list[str]:
    """Make `torch_geometric_temporal` give accelerated layers, also in modules that imported it before; return their
    names.

    Existing models keep the layers they have.

    Raises:
        ModuleNotFoundError: PyTorch Geometric Temporal is not installed.
    """
    with needs_extra("patch", "temporal"):
        recurrent = importlib.import_module(f"{_PACKAGE}.nn.recurrent")
    theirs = {getattr(recurrent, name): getattr(nn, name) for name in nn.__all__ if hasattr(recurrent, name)}
    for module in [m for key, m in list(sys.modules.items()) if m is not None and not key.startswith("pyg_direct")]:
        for name in nn.__all__:
            value = vars(module).get(name)
            if isinstance(value, type) and value in theirs:
                _replaced.append((module, name, value))
                setattr(module, name, theirs[value])
    return sorted({name for _, name, _ in _replaced})


def unpatch() -> None:
    """Restore the original layers under the replaced names."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)
