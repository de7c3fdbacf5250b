"""FiLMConv over sorted edges: rows of sources are scaled, shifted, activated and summed at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn import conv

from pyg_direct.nn import any_convolution
from pyg_direct.nn.any_convolution import KnownTargets
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.fused_messages import SUMS, find_changed, find_slope, find_slow, finish_sum, is_given, pair_nodes
from pyg_direct.ops.aggregate.sum_pairs import sum_affine


def find_left(module: Any) -> str | None:
    """Return why options of a FiLMConv leave it to the operators of any layer."""
    if module.num_relations > 1:
        # PyG's code selects them anew in each pass.
        return "edges of a relation are in no known order"
    if find_slope(module.act) is None:
        return "its activation has no operator"
    return find_changed(module, SUMS) or find_slow(module)


def fuse(self: Any, known: KnownTargets, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the sum or mean of messages, `[T, F]`."""
    given: Any = (kwargs.get(name) for name in ("x", "beta", "gamma"))
    rows, shift, factor = given
    slope = find_slope(self.act)
    if slope is None or not is_given(known, rows, shift, factor) or not known.fits(len(rows), len(shift)):
        return None
    out = sum_affine(factor, shift, rows, pair_nodes(known, len(rows), len(shift)), slope)
    return finish_sum(self, known, out)


FILM = ConvSpec(conv.FiLMConv, propagate=any_convolution.propagate, find_left=find_left, fuse=fuse, leaves_to_any=True,
                sees_neighbors_only=True)  # fmt: skip
