"""`pyg-direct cache`: files kept on disk between runs, shown and cleared."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyg_direct.cache_folder import cache_root
from pyg_direct.compiler.code_cache import cache_name

_DIGITS = set("0123456789abcdef")


class Action(str, Enum):
    """Action on the kept files."""

    show = "show"
    clear = "clear"


class Kind(str, Enum):
    """Kind of the kept files."""

    kernels = "kernels"
    old = "old"
    facts = "facts"


class Entry(NamedTuple):
    """Something kept.

    Attributes:
        kind: `kernels`, `old` kernels of other sources or compilers than these, or `facts` that were measured.
        path: A folder of kernels, or a file of facts.
    """

    kind: Kind
    path: Path
    num_files: int
    num_bytes: int


def list_kept() -> list[Entry]:
    """List the files that this package keeps; other files in the folder are left alone."""
    root, current = cache_root(), cache_name()
    if not os.path.isdir(root):
        return []
    entries = []
    for path in sorted(root.iterdir()):
        if path.is_dir() and len(path.name) == 16 and set(path.name) <= _DIGITS and not path.is_symlink():
            kind = Kind.kernels if path.name == current else Kind.old
            entries.append(Entry(kind, path, *_weigh(path)))
        elif path.is_file() and path.suffix == ".json":
            entries.append(Entry(Kind.facts, path, 1, path.stat().st_size))
    return entries


def _weigh(folder: Path) -> tuple[int, int]:
    """Number and bytes of the files below; others may come and go meanwhile."""
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


def remove(entry: Entry) -> None:
    """Delete it; processes that use it go on, and make it again when they need it."""
    if entry.path.is_dir():
        shutil.rmtree(entry.path)
    else:
        entry.path.unlink(missing_ok=True)
        # The lock that processes wait for while one of them measures.
        with contextlib.suppress(OSError):
            Path(f"{entry.path}.lock").unlink()


def cache(
    action: Annotated[Action, typer.Argument(help="Show what is kept, or clear it.")] = Action.show,
    only: Annotated[Optional[Kind], typer.Option(help="kernels of this version, old ones of others, or measured facts.")] = None,  # noqa: E501, UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Show or clear what is kept on disk: compiled kernels, and facts measured once for a machine.

    It lies in ~/.cache/pyg_direct, or in the folder that PYG_DIRECT_CACHE names, and is made again when needed.

    Exit codes: 0 done, 1 something could not be read or deleted, 2 bad usage.
    """
    entries: list[Entry] = []
    failed: list[str] = []
    removed: list[Entry] = []
    try:
        entries = [entry for entry in list_kept() if only in (None, entry.kind)]
    except OSError as error:
        failed.append(f"{cache_root()}: {error}")
    if action is Action.clear:
        for entry in entries:
            try:
                remove(entry)
                removed.append(entry)
            except OSError as error:
                failed.append(f"{entry.path}: {error}")
    if as_json:
        typer.echo(json.dumps({"folder": str(cache_root()), "action": action.value, "failed": failed,
                               "entries": [_to_json(entry) for entry in entries]}, indent=1))  # fmt: skip
    else:
        if action is Action.clear:
            _tell(len(entries), removed, failed)
        else:
            _print(entries, failed)
    raise typer.Exit(int(bool(failed)))


def _to_json(entry: Entry) -> dict[str, Any]:
    facts = None
    if entry.kind is Kind.facts:
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(entry.path.read_text())
    return {"kind": entry.kind.value, "name": entry.path.name, "files": entry.num_files, "bytes": entry.num_bytes,
            "facts": facts}  # fmt: skip


def _tell(count: int, removed: list[Entry], failed: list[str]) -> None:
    """Report how many entries are deleted, and why others are not."""
    from pyg_direct.profiling import show_bytes

    console = Console(highlight=False, markup=False)
    total = show_bytes(sum(entry.num_bytes for entry in removed))
    console.print(f"cleared {len(removed)} of {count} in {cache_root()}, {total}")
    for sentence in failed:
        console.print(sentence)


def _print(entries: list[Entry], failed: list[str]) -> None:
    # It imports torch.
    from pyg_direct.profiling import show_bytes

    console = Console(highlight=False)
    total = show_bytes(sum(entry.num_bytes for entry in entries))
    table = Table(title=escape(str(cache_root())), title_justify="left")
    for name in ("kind", "name", "files", "size"):
        table.add_column(name, justify="right" if name in ("files", "size") else "left")
    for entry in entries:
        table.add_row(entry.kind.value, escape(entry.path.name), str(entry.num_files), show_bytes(entry.num_bytes))
    console.print(table)
    hint = "; `pyg-direct cache clear --only old` deletes what no longer serves"
    console.print(f"{total} in all{hint if any(entry.kind is Kind.old for entry in entries) else ''}")
    for sentence in failed:
        console.print(sentence, markup=False)
