"""Random node features around one centroid per class."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.datasets.arguments import check_float_dtype, check_int, check_not_negative, make_generator
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.progress import Bar

# values of one chunk; the draws depend on it, so it is no argument
CHUNK_VALUES = 1 << 23


def fill_features(out: Tensor, y: Tensor, *, seed: int, num_classes: int, feature_signal: float) -> Tensor:
    """Write `feature_signal * centroid[y] + noise` into `out`, chunk by chunk, and return `out`.

    Centroids are random directions of length 1, the noise is normal with variance 1 in every feature, so
    `feature_signal` is a class's distance from the origin in standard deviations of the noise. The noise is
    drawn on the device of `y`: equal arguments give equal features on the same device type, whatever memory
    `out` lies in. `synthetic_graph` with the same seed, classes and signal fills its `x` with the same
    values.

    Args:
        out: Receives the features, floating point `[N, F]`, on any device.
        y: Class of every node, int64 `[N]`, values in [0, num_classes).
        seed: Any integer of at least 0.
        num_classes: Number of classes.
        feature_signal: Length of the centroids, at least 0.

    Returns:
        `out`, floating point `[N, F]`.

    Raises:
        ArgumentTypeError: `out` or `y` is no tensor, or `y` is not int64.
        ArgumentError: A shape, dtype or value is outside its rule.
    """
    seed = check_int("seed", seed, least=0)
    num_classes = check_int("num_classes", num_classes, least=1)
    feature_signal = check_not_negative("feature_signal", feature_signal)
    check_shapes(out, y, num_classes)

    num_nodes, num_features = out.shape
    # drawn on the CPU: the same centroids for every device
    generator = make_generator(seed, "centroids", torch.device("cpu"))
    centroid = torch.randn(num_classes, num_features, generator=generator, device="cpu")
    centroid = (feature_signal * centroid / centroid.norm(dim=1, keepdim=True)).to(y.device)
    generator = make_generator(seed, "features", y.device)
    num_rows = max(1, CHUNK_VALUES // max(1, num_features))
    with Bar(num_nodes, "drawing features", "nodes") as bar:
        for begin in range(0, num_nodes, num_rows):
            label = y[begin : begin + num_rows]
            noise = torch.randn(len(label), num_features, generator=generator, device=y.device)
            out[begin : begin + num_rows] = noise.add_(centroid[label]).to(out.dtype)
            bar.update(len(label))
    return out


def check_shapes(out: Tensor, y: Tensor, num_classes: int) -> None:
    """Raise unless `out` `[N, F]` can hold the features of the classes `y` `[N]`."""
    for name, value in (("out", out), ("y", y)):
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(f"{name} must be a tensor, got {type(value).__name__}")
    check_float_dtype("out.dtype", out.dtype)
    if y.dtype != torch.int64:
        raise ArgumentTypeError(f"y must be int64, got {y.dtype}")
    if out.dim() != 2 or y.shape != out.shape[:1]:
        raise ArgumentError(f"out must be [N, F] and y [N], got {list(out.shape)} and {list(y.shape)}")
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ArgumentError(f"y must lie in [0, {num_classes}), got {int(y.min())} to {int(y.max())}")
