"""`install` and `uninstall`: PyG's names bound to classes that make ours."""

from __future__ import annotations

import copyreg
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from torch_geometric.nn.models.basic_gnn import BasicGNN

from pyg_direct.errors import ArgumentError
from pyg_direct.loader.placement import PLACEMENTS, announce
from pyg_direct.noedit.inference import make_inference
from pyg_direct.noedit.models import accelerate_what_is_made, leave_what_is_made
from pyg_direct.noedit.standin import make_stand_in, send_original
from pyg_direct.noedit.table import LEFT, REPLACEMENTS, Replacement
from pyg_direct.runtime.device import resolve_device
from pyg_direct.runtime.size import parse_size
from pyg_direct.sampling.key import check_seed
from pyg_direct.typing import Device

# Names that were bound anew: (module, name, what it was bound to before).
_BOUND: list[tuple[Any, str, Any]] = []


def install(*, device: Device = None, placement: str = "auto", feature_cache: int | str | None = None,
            seed: int | None = None, accelerate: bool = True, verbose: bool = False) -> None:  # fmt: skip
    """Replace PyG's loaders under their own names, also in modules that have imported them already, and accelerate the
    models that are made from now on.

    A program then makes ours where it makes PyG's, with PyG's arguments and batches. `n_id`, `e_id`, `input_id` and the
    fields of seed links of a batch are found on the host, as PyG has them, and are copied there when they are read;
    everything else is on `device`. PyG's `model.inference(loader)` is done by `infer`. What ours does not offer, and
    classes that the program derives from PyG's, are left to PyG. The logger `pyg_direct` says what was replaced and
    what was left, and why, once. Installing again changes the arguments.

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
    place = device if device is None or device == "data" else resolve_device(device)
    uninstall()
    options = {"device": place, "placement": placement, "feature_cache": feature_cache, "seed": seed}
    for entry in REPLACEMENTS:
        original = getattr(importlib.import_module(entry.module), entry.name)
        stand_in = make_stand_in(original, entry.ours, options, verbose)
        copyreg.pickle(original, send_original)
        for module, name in list(_find_names(entry, original)):
            _BOUND.append((module, name, original))
            setattr(module, name, stand_in)
    _BOUND.append((BasicGNN, "inference", BasicGNN.inference))
    BasicGNN.inference = make_inference(BasicGNN.inference)
    if accelerate:
        accelerate_what_is_made()
    names = ", ".join(_path(entry) for entry in REPLACEMENTS)
    models = "models are accelerated" if accelerate else "models are left as they are"
    announce(f"replaced {names} of PyG; {models}; left to PyG, as there are none of ours: {', '.join(LEFT)}")


def uninstall() -> None:
    """Bind PyG's names to PyG's classes again; loaders and models that were made stay as they are."""
    leave_what_is_made()
    while _BOUND:
        module, name, original = _BOUND.pop()
        setattr(module, name, original)
        copyreg.dispatch_table.pop(original, None)


def _find_names(entry: Replacement, original: type) -> Iterator[tuple[Any, str]]:
    """Modules and names that hold PyG's class: those of PyG that the table lists, and all that are not PyG's."""
    homes = {entry.module, *entry.also}
    for key, module in list(sys.modules.items()):
        room = key.partition(".")[0]
        if key in homes if room == "torch_geometric" else room != __package__.partition(".")[0]:
            names = getattr(module, "__dict__", {})
            yield from ((module, name) for name, value in list(names.items()) if value is original)


def _path(entry: Replacement) -> str:
    """The name as programs import it, such as `loader.NeighborLoader`."""
    return f"{entry.module.split('.')[1]}.{entry.name}"
