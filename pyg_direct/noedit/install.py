"""`install` and `uninstall`: PyG's classes make ours."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from torch_geometric.nn.models.basic_gnn import BasicGNN

from pyg_direct.errors import ArgumentError
from pyg_direct.loader.placement import PLACEMENTS, announce
from pyg_direct.noedit.inference import make_inference
from pyg_direct.noedit.models import accelerate_what_is_made, leave_what_is_made
from pyg_direct.noedit.standin import StandIn, give_back, replace
from pyg_direct.noedit.table import LEFT, REPLACEMENTS
from pyg_direct.runtime.device import resolve_device
from pyg_direct.runtime.size import parse_size
from pyg_direct.sampling.key import check_seed
from pyg_direct.typing import Device

# What was bound anew: (object, name of its attribute, what it was bound to before).
_BOUND: list[tuple[Any, str, Any]] = []


def install(*, device: Device = None, placement: str = "auto", feature_cache: int | str | None = None,
            seed: int | None = None, accelerate: bool = True, verbose: bool = False) -> None:  # fmt: skip
    """Let PyG's loaders make ours, under every name that they have anywhere, and accelerate the models that are made,
    loaded or copied from now on.

    A program then makes ours where it makes PyG's, with PyG's arguments and batches; PyG's classes stay what they are.
    `n_id`, `e_id`, `input_id` and the fields of seed links of a batch are found on the host, as PyG has them, and are
    copied there when they are read; everything else is on `device`. PyG's `model.inference(loader)` is done by `infer`.
    What ours does not offer, and classes that the program derives from PyG's, are left to PyG. The logger `pyg_direct`
    says what was replaced and what was left, and why, once. Installing again changes the arguments.

    Args:
        device: Where to sample and where batches are; None is the current GPU if there is one, else the CPU; `"data"`
            is where the data of each loader is.
        placement: See `NeighborLoader`.
        feature_cache: See `NeighborLoader`.
        seed: See `NeighborLoader`.
        accelerate: Whether PyG's convolutions are accelerated as they are made; see `accelerate`.
        verbose: Whether every kind of loader made is told.

    Raises:
        ArgumentError, ArgumentTypeError: `placement`, `feature_cache` or `seed` is none that a loader takes.
        DeviceError: `device` is a GPU that is not there.
    """
    if placement not in PLACEMENTS:
        raise ArgumentError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
    parse_size(0 if feature_cache is None else feature_cache, 0, "feature_cache")
    check_seed(seed)
    if device is not None and device != "data":
        place = resolve_device(device)
        # Without a number it is the current GPU when a loader is made, in each process another one.
        device = device if str(device) == place.type else place
    start(device=device, placement=placement, feature_cache=feature_cache, seed=seed, accelerate=accelerate,
          verbose=verbose)  # fmt: skip
    names = ", ".join(entry.path for entry in REPLACEMENTS)
    models = "models are accelerated" if accelerate else "models are left as they are"
    announce(f"replaced {names} and model.inference of PyG; {models}; left to PyG, as there are none of ours: "
             f"{', '.join(LEFT)}")  # fmt: skip


def start(*, accelerate: bool = True, verbose: bool = False, **options: Any) -> None:
    """`install` without a look at its arguments and without a word, as in a process that another one has started.

    Args:
        accelerate, verbose: See `install`.
        options: The other arguments of `install`.
    """
    uninstall()
    for original, ours in REPLACEMENTS:
        replace(original, StandIn(ours, options, verbose))
    inference = BasicGNN.inference
    _BOUND.append((BasicGNN, "inference", inference))
    BasicGNN.inference = make_inference(inference)
    if accelerate:
        accelerate_what_is_made()


def hand_down(**options: Any) -> None:
    """Let Python processes that this one starts from now on make ours, too, as soon as they import PyG.

    They find `startup/sitecustomize.py` by their environment, and so do those that they start.

    Args:
        options: Arguments of `start`, which can be written as JSON.
    """
    os.environ["PYG_DIRECT_RUN"] = json.dumps({"prefix": sys.prefix, "options": options})
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
    before = os.environ.get("PYTHONPATH")
    others = [path for path in before.split(os.pathsep) if path != folder] if before else []
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *others])


def uninstall() -> None:
    """Let PyG's classes make PyG's again; loaders and models that were made stay as they are."""
    leave_what_is_made()
    give_back()
    while _BOUND:
        setattr(*_BOUND.pop())
