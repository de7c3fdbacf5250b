"""`pyg-direct pack`: rewrite a table of rows so that rows that are read together lie together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Optional

import typer

from pyg_direct.cli.failures import said_in_options
from pyg_direct.errors import PygDirectError


def pack(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(help="Table of rows: .npy, .safetensors or .parquet.")],
    target: Annotated[Path, typer.Argument(help="File to write: .safetensors.")],
    order: Annotated[Optional[Path], typer.Option(help=".npy of the id of each row of the new file.")] = None,  # noqa: UP045
    hotness: Annotated[Optional[Path], typer.Option(help=".npy of a score for each row: the hottest come first.")] = None,  # noqa: E501, UP045
    edges: Annotated[Optional[Path], typer.Option(help=".npy of the edges [2, E]: rows of the sources of most edges come first.")] = None,  # noqa: E501, UP045
    parts: Annotated[Optional[Path], typer.Option(help=".npy of the community of each row.")] = None,  # noqa: UP045
    input_nodes: Annotated[Optional[Path], typer.Option(help=".npy of the nodes to train on: rows that the same windows of the first epochs read lie together. Needs --edges, --num-neighbors, --seed and --ahead.")] = None,  # noqa: E501, UP045
    num_neighbors: Annotated[str, typer.Option(help="Of the loader, such as 15,10,5.")] = "",
    batch_size: Annotated[Optional[int], typer.Option(help="Of the loader; without it, 1.")] = None,  # noqa: UP045
    shuffle: Annotated[Optional[bool], typer.Option(help="Of the loader; without it, --shuffle.")] = None,  # noqa: UP045
    seed: Annotated[Optional[int], typer.Option(help="Of the loader.")] = None,  # noqa: UP045
    ahead: Annotated[str, typer.Option(help="Of the loader: batches such as 8, or memory such as 8G. On a GPU set PYG_DIRECT_AHEAD_GPU too, as in training.")] = "",  # noqa: E501
    num_epochs: Annotated[Optional[int], typer.Option("--epochs", help="Number of epochs, from the first on; without it, 1.")] = None,  # noqa: E501, UP045
    memory: Annotated[str, typer.Option(help="Memory for the rows that are moved at a time.")] = "1G",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:  # fmt: skip
    """Rewrite a table in the order of epochs, hotness or communities; `Feature.from_file` reads it by the same ids.

    An interrupted run leaves TARGET.partial, and the same command continues there. A .parquet takes no order.

    Exit codes: 0 written, 1 not written, 2 bad usage.
    """
    # torch is not imported before the options are read.
    import numpy as np
    import torch

    from pyg_direct.features.packed_rows import pack_rows
    from pyg_direct.features.row_files import RowFile

    is_parquet = source.suffix.lower() == ".parquet"
    if is_parquet and any(given is not None for given in (order, hotness, edges, parts, input_nodes)):
        raise typer.BadParameter("give no order for a .parquet, and pack the file that it becomes")
    is_known = edges is not None and parts is None and num_neighbors and seed is not None and ahead
    if input_nodes is not None and not is_known:
        raise typer.BadParameter("give --edges, --num-neighbors, --seed and --ahead with --input-nodes, and no --parts")
    of_loader = (num_neighbors or None, seed, ahead or None, batch_size, shuffle, num_epochs)
    if input_nodes is None and any(given is not None for given in of_loader):
        raise typer.BadParameter("give --num-neighbors, --seed, --ahead, --batch-size, --shuffle, --no-shuffle and "
                                 "--epochs only with --input-nodes")  # fmt: skip
    if not is_parquet and (order is not None) == (hotness is not None or edges is not None or parts is not None):
        raise typer.BadParameter("give --order alone, or some of --hotness, --edges and --parts")
    if hotness is not None and edges is not None:
        raise typer.BadParameter("give --hotness or --edges, not both")
    if num_neighbors and not all(re.fullmatch(r"\s*-?[0-9]+\s*", part) for part in num_neighbors.split(",")):
        raise typer.BadParameter(f"--num-neighbors must be integers, such as 15,10,5, got {num_neighbors}")

    def load(path: Path, name: str) -> np.ndarray:
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"--{name} must name a .npy file, got {path}: {error}") from error

    try:
        with said_in_options(context):
            chosen: torch.Tensor | None = None
            if order is not None:
                chosen = torch.from_numpy(np.array(load(order, "order")))
            elif input_nodes is not None and edges is not None:
                # Imported where it is needed: loaders take seconds.
                from pyg_direct.loader.row_order import order_by_epochs

                pairs, num_rows = np.array(load(edges, "edges")), RowFile(source).layout.shape[0]
                if pairs.ndim != 2 or len(pairs) != 2 or pairs.dtype not in (np.int32, np.int64):
                    raise typer.BadParameter(f"--edges must be int32 or int64 of shape (2, E), got {pairs.dtype} of "
                                             f"shape {pairs.shape}")  # fmt: skip
                if pairs.size and not 0 <= pairs.min() <= pairs.max() < num_rows:
                    raise typer.BadParameter(f"--edges must lie in [0, {num_rows}), the rows of {source}, got "
                                             f"{pairs.min()} to {pairs.max()}")  # fmt: skip
                chosen = order_by_epochs(source, torch.from_numpy(pairs),
                                         torch.from_numpy(np.array(load(input_nodes, "input-nodes"))),
                                         1 if num_epochs is None else num_epochs,
                                         num_neighbors=[*map(int, num_neighbors.split(","))],
                                         ahead=int(ahead) if ahead.isdecimal() else ahead,
                                         batch_size=1 if batch_size is None else batch_size,
                                         shuffle=shuffle is not False, seed=seed)  # fmt: skip
            elif not is_parquet:
                num_rows = RowFile(source).layout.shape[0]
                scores: np.ndarray = np.zeros(num_rows)
                if hotness is not None:
                    scores = np.array(load(hotness, "hotness"))
                elif edges is not None:
                    scores = np.bincount(load(edges, "edges")[0], minlength=num_rows)
                communities = np.zeros(num_rows) if parts is None else np.array(load(parts, "parts"))
                for name, values in (("edges" if hotness is None else "hotness", scores), ("parts", communities)):
                    if values.shape != (num_rows,):
                        raise typer.BadParameter(f"--{name} must have a number for each of the {num_rows} rows, got "
                                                 f"shape {values.shape}")  # fmt: skip
                chosen = torch.from_numpy(np.lexsort((-scores, communities)))
            pack_rows(source, target, chosen, memory=memory)
    except PygDirectError as error:
        typer.echo(f"pyg-direct pack: {error}", err=True)
        raise typer.Exit(1) from error
    num_rows = RowFile(target).layout.shape[0]
    written = {"file": str(target), "num_rows": num_rows}
    typer.echo(json.dumps(written, indent=1) if as_json else f"{target}: {num_rows} rows")
