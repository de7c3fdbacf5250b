"""Shapes of the graphs that papers report on."""

from __future__ import annotations

from typing import NamedTuple


class Preset(NamedTuple):
    """Shape of a graph at scale 1, and what makes its classes learnable.

    Attributes:
        num_nodes, num_features, num_classes: As published.
        num_edges: As published, both directions counted unless `directed`.
        num_train, num_val, num_test: Nodes of the official split.
        directed: Whether edges are stored in one direction.
        hub: Largest expected degree, in mean degrees.
        homophily, feature_signal: Defaults of `synthetic_graph`, calibrated so that features alone tell about
            half the classes and neighborhoods most, never all.
    """

    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    num_train: int
    num_val: int
    num_test: int
    directed: bool
    hub: float
    homophily: float
    feature_signal: float


PRESETS = {
    "products": Preset(
        num_nodes=2_449_029,
        num_edges=123_718_280,
        num_features=100,
        num_classes=47,
        num_train=196_615,
        num_val=39_323,
        num_test=2_213_091,
        directed=False,
        hub=350.0,
        homophily=0.4,
        feature_signal=2.5,
    ),
    "reddit": Preset(
        num_nodes=232_965,
        num_edges=114_615_892,
        num_features=602,
        num_classes=41,
        num_train=153_431,
        num_val=23_831,
        num_test=55_703,
        directed=False,
        hub=45.0,
        homophily=0.1,
        feature_signal=2.4,
    ),
    "papers100M": Preset(
        num_nodes=111_059_956,
        num_edges=1_615_685_872,
        num_features=128,
        num_classes=172,
        num_train=1_207_179,
        num_val=125_265,
        num_test=214_338,
        directed=True,
        hub=2000.0,
        homophily=0.5,
        feature_signal=2.7,
    ),
}
