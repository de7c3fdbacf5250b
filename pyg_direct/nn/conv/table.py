"""The table of accelerated convolutions: a line for each."""

from __future__ import annotations

from pyg_direct.nn.conv import (
    edge,
    film,
    gat,
    gcn,
    gen,
    gin,
    gine,
    hgt,
    nn_conv,
    pna,
    res_gated,
    rgcn,
    sage,
    supergat,
    transformer,
)
from pyg_direct.nn.conv.spec import ConvSpec

SPECS: tuple[ConvSpec, ...] = (
    sage.SAGE,
    sage.GRAPH,
    gin.GIN,
    gcn.GCN,
    gine.GINE,
    gat.GAT,
    gat.GATV2,
    hgt.HGT,
    # Derived from the next.
    rgcn.FAST_RGCN,
    rgcn.RGCN,
    transformer.TRANSFORMER,
    pna.PNA,
    edge.EDGE,
    film.FILM,
    gen.GEN,
    nn_conv.NN,
    res_gated.RES_GATED,
    supergat.SUPER_GAT,
)


def find_spec(kind: type) -> ConvSpec | None:
    """Return the accelerated convolution that a class is, or is derived from; None for others."""
    return next((spec for spec in SPECS if issubclass(kind, spec.kind)), None)
