"""What a sampler has opened of its graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyg_direct.loader.graph import Parts


@dataclass
class Opened:
    """What copies of a sampler share: the parts of its graph, placed topologies and plans."""

    parts: Parts
    plans: dict[Any, Any] = field(default_factory=dict)
    # Plans by what the attributes hold, which is quicker to tell; fanouts are kept so that their ids stay their own.
    quick: dict[Any, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
