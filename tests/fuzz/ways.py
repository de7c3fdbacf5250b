"""What loaders of every kind share: words for their options, and how an epoch is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from random import Random
from typing import Any

import torch

from pyg_direct.ops import run_kernel
from tests.fuzz.space import Row
from tests.reference.draw import batch_key
from tests.reference.epoch import list_batches

STORED = {"none": None, "half": torch.float16, "brain": torch.bfloat16, "float8": torch.float8_e4m3fn}
CACHES = {"none": None, "zero": 0, "some": "20%", "all": "1G"}
RANKS = {"none": (None, "pad"), "first": ((0, 2), "pad"), "last": ((2, 3), "keep"), "drop": ((1, 2), "drop")}
# A share of the cores is taken from this many edges on.
THREADS = {"one": run_kernel.FEW_ITEMS, "all": 0}


def placements(device: str) -> tuple[str, ...]:
    """Where rows and topology can lie for a device."""
    return ("auto", "cpu") if device == "cpu" else ("auto", "cuda", "unified", "pinned")


def loading_options(device: str) -> dict[str, tuple[str, ...]]:
    """Options of every loader."""
    return {
        "placement": placements(device), "threads": ("one", "all"), "prefetch": ("0", "1", "3"),
        "store": tuple(STORED), "cache": tuple(CACHES), "order": ("given", "shuffle", "drop_last"),
        "leave": ("never", "early", "resume", "call"), "ids": ("int64", "int32"), "epochs": ("1", "9"),
        "hook": ("none", "output", "batch"),
    }  # fmt: skip


@contextmanager
def threads_of(row: Row) -> Iterator[None]:
    """Loops on one thread, or on all whatever the size of a batch."""
    before, run_kernel.FEW_ITEMS = run_kernel.FEW_ITEMS, THREADS[row["threads"]]
    try:
        yield
    finally:
        run_kernel.FEW_ITEMS = before


def topology_options(device: str) -> dict[str, tuple[str, ...]]:
    """Where neighbor lists lie, if not where rows do, and what of them a cache has."""
    return {"topology": ("same", *placements(device)), "topology_cache": ("none", "some")}


def read_topology(row: Row) -> dict[str, Any]:
    """Arguments for a loader that samples."""
    return {"topology_placement": None if row["topology"] == "same" else row["topology"],
            "topology_cache": None if row["topology_cache"] == "none" else "20%"}  # fmt: skip


def same(value: Any) -> Any:
    """A hook that changes nothing."""
    return value


def read_loading(row: Row, random: Random, device: str) -> dict[str, Any]:
    """Arguments for a loader."""
    return {
        "device": device, "placement": row["placement"], "prefetch": int(row["prefetch"]),
        "store_dtype": STORED[row["store"]], "feature_cache": CACHES[row["cache"]],
        "shuffle": row["order"] != "given", "drop_last": row["order"] == "drop_last",
        "batch_size": random.choice([1, 1, 2, 4]), "seed": random.getrandbits(64),
        "transform_sampler_output": same if row["hook"] == "output" else None,
        "transform": same if row["hook"] == "batch" else None,
    }  # fmt: skip


def run_epochs(make: Callable[[], Any], row: Row, random: Random, count: int, options: dict[str, Any],
               check: Callable[[Any, list[int], int], None]) -> int:  # fmt: skip
    """Check the batches of some epochs, left and resumed as the row says; returns their number.

    Args:
        make: Makes the loader, anew for an epoch that is resumed.
        row, random: The case.
        count: Number of inputs.
        options: Those of the loader.
        check: Called with a batch, the positions of its inputs and its key.
    """
    (rank, ranks), uneven = options.get("ranks") or (0, 1), options.get("uneven", "pad")
    loader, checked, leave, seed = make(), 0, row["leave"], options["seed"]
    for epoch in range(int(row["epochs"])):
        expected = list_batches(count, options["batch_size"], seed, epoch, options["shuffle"], options["drop_last"],
                                rank, ranks, uneven)  # fmt: skip
        assert len(loader) == len(expected), f"{len(loader)} batches, expected {len(expected)}"
        end = random.randint(0, len(expected)) if leave in ("early", "resume") and epoch == 0 else len(expected)
        iterator = iter(loader)
        for batch, (number, positions) in zip(islice(iterator, end), expected[:end], strict=True):
            check(batch, positions, batch_key(seed, epoch, number))
            checked += 1
        if leave == "resume" and epoch == 0:
            state = loader.state_dict()
            del iterator
            loader = make()
            loader.load_state_dict(state)
            for batch, (number, positions) in zip(loader, expected[end:], strict=True):
                check(batch, positions, batch_key(seed, epoch, number))
                checked += 1
        elif end == len(expected):
            assert next(iterator, None) is None, "more batches than expected"
    return checked
