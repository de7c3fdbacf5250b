"""Several processes on one machine, as `torch.multiprocessing.spawn` starts them, in a group over gloo."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(fn: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """What `fn(rank, *args)` returns in each of `count` processes of one group, by rank.

    An error in one of them ends the others and is raised here with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, args=(fn, count, folder, args), nprocs=count)
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(count)]


def _run(rank: int, fn: Callable[..., Any], count: int, folder: str, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count)
    torch.save(fn(rank, *args), f"{folder}/{rank}")
    # Not after an error: the others would fail at the closed connection, and might be heard first.
    dist.destroy_process_group()
