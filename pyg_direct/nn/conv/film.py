"""FiLMConv over sorted edges: rows of sources are scaled, shifted, activated and summed at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv

from pyg_direct.nn import any_convolution
from pyg_direct.nn.any_convolution import KnownTargets
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.fused_messages import (
    SUMS,
    count_first,
    find_changed,
    find_slope,
    find_slow,
    finish_sum,
    is_given,
    is_matrix,
    pair_nodes,
    read_ends,
)
from pyg_direct.nn.linear import Product, add_to_first, multiply_ends
from pyg_direct.ops.aggregate.sum_pairs import sum_affine


def forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
    """Override `forward` of an accelerated FiLMConv."""
    (rows, targets), slope = read_ends(x), find_slope(self.act)
    matrices = [self.lins[0], self.films[0], self.film_skip, self.lin_skip] if self.num_relations <= 1 else []
    count = count_first(self, edge_index, rows, targets) if matrices and all(map(is_matrix, matrices)) else None
    if count is None or slope is None:
        return type(self).forward(self, x, edge_index, edge_type)
    lin, film, film_skip, skip = (Product(part.weight, part.bias) for part in matrices)
    values, beta, gamma, shift, factor, own = multiply_ends(
        rows, targets, [lin], [*_halve(film, count), *_halve(film_skip, None), skip]
    )
    made = torch.addcmul(shift, factor, own)
    # Functions that do not read their result again.
    made = made if slope == 1 else F.leaky_relu(made, slope) if slope else F.threshold(made, 0.0, 0.0)
    return add_to_first(made, self.propagate(edge_index, x=values, beta=beta, gamma=gamma))


def _halve(film: Product, num_rows: int | None) -> list[Product]:
    """Return the products that shift and scale the first rows."""
    biases = (None, None) if film.bias is None else film.bias.chunk(2)
    return [Product(weight, bias, num_rows) for weight, bias in zip(film.weight.chunk(2), biases, strict=True)]


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


FILM = ConvSpec(conv.FiLMConv, forward, any_convolution.propagate, find_left=find_left, fuse=fuse, leaves_to_any=True,
                sees_neighbors_only=True)  # fmt: skip
