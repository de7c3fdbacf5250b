"""`pyg-direct partition`: partition a graph in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer

from pyg_direct.cli.failures import explain_write, said_in_options
from pyg_direct.errors import PygDirectError

_METHODS = ("hash", "range", "metis", "streaming")


def partition(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="Folder of the partition, which must not exist yet.")],
    edges: Annotated[list[str], typer.Option(help="File (.npy or .parquet) of the edges; src:name:dst=FILE for each "
                                             "relation of a graph with types.")],
    num_parts: Annotated[int, typer.Option(help="Number of parts.")],
    num_nodes: Annotated[Optional[list[str]], typer.Option(help="N, or TYPE=N; by default by the largest id.")] = None,  # noqa: UP045
    method: Annotated[str, typer.Option(help="hash, range, metis, streaming, or a .npy file of parts.", autocompletion=lambda: _METHODS)] = "hash",  # noqa: E501
    direction: Annotated[str, typer.Option(help="Edges that a part holds of its nodes: in or out.")] = "in",
    node_rows: Annotated[Optional[list[str]], typer.Option(help="NAME=FILE.npy, or TYPE.NAME=FILE.npy.")] = None,  # noqa: UP045
    edge_rows: Annotated[Optional[list[str]], typer.Option(help="NAME=FILE.npy, src:name:dst.NAME=FILE.npy.")] = None,  # noqa: UP045
    node_time: Annotated[Optional[list[str]], typer.Option(help="FILE.npy, or TYPE=FILE.npy.")] = None,  # noqa: UP045
    edge_time: Annotated[Optional[list[str]], typer.Option(help="FILE.npy, or src:name:dst=FILE.npy.")] = None,  # noqa: UP045
    edge_weight: Annotated[Optional[list[str]], typer.Option(help="FILE.npy, or src:name:dst=FILE.npy.")] = None,  # noqa: UP045
    memory: Annotated[str, typer.Option(help="Memory for the pieces that are worked on at a time.")] = "1G",
    seed: Annotated[int, typer.Option(help="Seed of METIS.")] = 0,
    progress: Annotated[bool, typer.Option(help="Show progress bars.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:  # fmt: skip
    """Write a graph in parts, for training on several machines.

    An interrupted run leaves the folder OUT.partial, and the same command continues there.

    Exit codes: 0 written, 1 not written, 2 bad usage.
    """
    # torch is not imported before the options are read.
    from pyg_direct.distributed.partitioning.inputs import load_array
    from pyg_direct.distributed.partitioning.partition_graph import partition_graph

    try:
        with said_in_options(context):
            typed = any("=" in value for value in edges)
            manifest = partition_graph(
                out, _read(edges, typed, _relation), num_parts,
                num_nodes=_sizes(num_nodes, typed),
                method=load_array(method, "method") if method.endswith(".npy") else method, direction=direction,
                node_rows=_nest(node_rows, typed, str), edge_rows=_nest(edge_rows, typed, _relation),
                node_time=_read(node_time, typed, str), edge_time=_read(edge_time, typed, _relation),
                edge_weight=_read(edge_weight, typed, _relation), memory=memory, seed=seed,
                progress=progress)  # fmt: skip
    except typer.BadParameter:
        begun = _begun(out)
        if (begun / "journal.json").exists():
            typer.echo(f"{begun} is left of it: a command with other arguments begins anew there", err=True)
        raise
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    except PygDirectError as error:
        _fail(str(error), out)
    except OSError as error:
        _fail(explain_write(error, out, "OUT"), out)
    except ModuleNotFoundError as error:
        # METIS, and parquet files, are of an extra.
        _fail(str(error), out)
    except KeyboardInterrupt:
        _tell_begun(out)
        raise
    written = sum(entry.num_nodes for entry in manifest.nodes)
    num_edges = sum(entry.num_edges for entry in manifest.edges)
    if as_json:
        typer.echo(json.dumps({"folder": str(out), "num_parts": num_parts, "num_nodes": written,
                               "num_edges": num_edges, "num_cut": int(manifest.num_cut)}, indent=1))  # fmt: skip
    else:
        typer.echo(f"{out}: {written} nodes and {num_edges} edges in {num_parts} parts, "
                   f"{manifest.num_cut / max(1, num_edges):.1%} of the edges between parts")  # fmt: skip


def _fail(message: str, out: Path) -> NoReturn:
    typer.echo(message, err=True)
    _tell_begun(out)
    raise typer.Exit(1)


def _begun(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _tell_begun(out: Path) -> None:
    """Report where the work of an unfinished run lies, and remove a folder that holds none."""
    begun = _begun(out)
    if not begun.exists():
        return
    try:
        begun.rmdir()
        begun.with_name(f"{begun.name}.lock").unlink(missing_ok=True)
    except OSError:
        typer.echo(f"{begun} holds what is done: the same command goes on from there; delete the folder to give it up",
                   err=True)  # fmt: skip


def _relation(name: str) -> tuple[str, ...]:
    parts = tuple(name.split(":"))
    if len(parts) != 3:
        raise typer.BadParameter(f"a relation must look like src:name:dst, got {name!r}")
    return parts


def _pair(value: str) -> tuple[str, str]:
    name, equals, file = value.partition("=")
    if not equals:
        raise typer.BadParameter(f"{value!r} must look like NAME=FILE")
    return name, file


def _read(values: Sequence[str] | None, typed: bool, kind: Any) -> Any:
    """Parse one file, or files by type."""
    if not values:
        return None
    if not typed:
        if len(values) > 1:
            raise typer.BadParameter(f"{values} must be one file for a graph without types")
        return values[0]
    pairs = [(kind(name), file) for name, file in map(_pair, values)]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise typer.BadParameter(f"{values} must name each type once")
    return found


def _sizes(values: Sequence[str] | None, typed: bool) -> Any:
    try:
        found = _read(values, typed, str)
        return {kind: int(size) for kind, size in found.items()} if isinstance(found, dict) else found and int(found)
    except ValueError as error:
        raise typer.BadParameter(f"--num-nodes must be integers, got {values}") from error


def _nest(values: Sequence[str] | None, typed: bool, kind: Any) -> Any:
    """Parse files by attribute, or by type and attribute."""
    found: dict[Any, Any] = {}
    for name, file in map(_pair, values or []):
        owner, dot, attribute = name.rpartition(".") if typed else ("", ".", name)
        if not dot:
            raise typer.BadParameter(f"{name!r} must look like TYPE.NAME for a graph with types")
        own = found.setdefault(kind(owner), {}) if typed else found
        if attribute in own:
            raise typer.BadParameter(f"{values} must name each attribute once, got {name!r} again")
        own[attribute] = file
    return found or None
