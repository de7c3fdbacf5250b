"""`Manifest`: the description of a partition on disk, and `PartitionBook`: the owner of each node.

`FORMAT.md` beside this file specifies the format.

A folder holds `manifest.json`, which is written last, and `.npy` files, whose sizes and checksums it lists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.cache_folder import write_whole
from pyg_direct.distributed.partitioning.files import describe_file, read_array
from pyg_direct.errors import ArgumentError, ArgumentTypeError, PartitionError
from pyg_direct.ops.sampling.join_remote_edges import find_buckets
from pyg_direct.progress import Bar

# Constants of splitmix64's finaliser, as signed words.
_MIX_0 = -0x40A7B892E31B1A47
_MIX_1 = -0x6B2FB644ECCEEE15
_MAX_PARTS = 1 << 15


@dataclass(frozen=True)
class Book:
    """Owner of each node of a type: by a hash of its id, by ranges of ids, or by a table.

    Attributes:
        bounds: First node of each part and N, int64 `[P + 1]`, for ranges.
        table: Part of each node, uint8 or int16 `[N]`, for a table. Without both, a hash assigns nodes.
    """

    num_nodes: int
    num_parts: int
    bounds: Tensor | None = None
    table: Tensor | None = None

    def __post_init__(self) -> None:
        check_num_parts(self.num_parts)
        if self.bounds is not None:
            bounds = self.bounds
            is_ascending = bounds.shape == (self.num_parts + 1,) and bool((bounds.diff() >= 0).all())
            if not is_ascending or int(bounds[0]) != 0 or int(bounds[-1]) != self.num_nodes:
                raise ArgumentError(f"bounds must ascend from 0 to {self.num_nodes} in {self.num_parts} steps, got "
                                    f"{bounds.tolist()}")  # fmt: skip
        if self.table is not None:
            if self.table.shape != (self.num_nodes,):
                raise ArgumentError(f"table must have shape ({self.num_nodes},), got {tuple(self.table.shape)}")
            if self.num_nodes and not 0 <= int(self.table.min()) <= int(self.table.max()) < self.num_parts:
                raise ArgumentError(f"table must hold parts in [0, {self.num_parts}), got {int(self.table.min())} to "
                                    f"{int(self.table.max())}")  # fmt: skip

    @property
    def kind(self) -> str:
        """Name of the rule: `hash`, `range` or `table`."""
        return "hash" if self.bounds is None and self.table is None else "range" if self.table is None else "table"

    @classmethod
    def by_range(cls, num_nodes: int, num_parts: int) -> Book:
        """Make a book of equal ranges of ids."""
        check_num_parts(num_parts)
        bounds = torch.arange(num_parts + 1, dtype=torch.int64, device="cpu") * num_nodes // num_parts
        return cls(num_nodes, num_parts, bounds=bounds)

    @classmethod
    def by_table(cls, table: Any, num_parts: int) -> Book:
        """Make a book of given parts of all nodes, integers `[N]`."""
        check_num_parts(num_parts)
        table = table if isinstance(table, Tensor) else torch.as_tensor(table, device="cpu")
        if table.dtype == torch.bool or table.is_floating_point() or table.is_complex():
            raise ArgumentTypeError(f"table must hold integers, got {table.dtype}")
        # Compared in int64: a narrower dtype would wrap invalid numbers around to valid parts.
        table = table.long()
        if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < num_parts:
            raise ArgumentError(f"table must hold parts in [0, {num_parts}), got {int(table.min())} to "
                                f"{int(table.max())}")  # fmt: skip
        return cls(len(table), num_parts, table=table.to(table_dtype(num_parts)))

    def owners(self, ids: Tensor) -> Tensor:
        """Return the part of each node, int64 `[n]`, for ids int64 `[n]`, on their device."""
        if self.table is not None:
            return self._on(ids.device, "table")[ids].long()
        if self.bounds is not None:
            return torch.searchsorted(self._on(ids.device, "bounds")[1:-1], ids, right=True)
        mixed = _shift(ids, 30, ids) * _MIX_0
        mixed = _shift(mixed, 27, mixed) * _MIX_1
        return (((mixed >> 32) & 0x7FFFFFFF) * self.num_parts) >> 31

    def find_buckets(self, ids: Tensor, own: int, scale: int, add: int, keys: Tensor) -> None:
        """Write the bucket keys of requested nodes (see `ops/sampling/join_remote_edges.py`)."""
        find_buckets(ids, self.num_parts, *self.find_arrays(ids.device), own, scale, add, keys)

    def find_arrays(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (first nodes of all parts but the first, part of each node) on a device; an unused one is empty."""
        bounds = torch.empty(0, dtype=torch.int64, device=device) if self.bounds is None else self._on(
            device, "bounds")[1:-1]  # fmt: skip
        table = torch.empty(0, dtype=torch.uint8, device=device) if self.table is None else self._on(device, "table")
        return bounds, table

    def _on(self, device: torch.device, name: str) -> Tensor:
        """Return `bounds` or `table` on a device, copied there once."""
        own: Tensor = getattr(self, name)
        if own.device == device:
            return own
        copies: dict[Any, Tensor] = self.__dict__.setdefault("_copies", {})
        if (name, device) not in copies:
            copies[name, device] = own.to(device)
        return copies[name, device]

    def owners_between(self, begin: int, end: int) -> np.ndarray:
        """Return the parts of the nodes begin, ..., end - 1, int64."""
        return self.owners(torch.arange(begin, end, device="cpu")).numpy()


def check_num_parts(num_parts: Any) -> int:
    """Check a number of parts, which may be a NumPy integer."""
    is_number = isinstance(num_parts, (int, np.integer)) and not isinstance(num_parts, bool)
    if not is_number or not 1 <= num_parts < _MAX_PARTS:
        raise ArgumentError(f"num_parts must be an integer in [1, {_MAX_PARTS}), got {num_parts!r}")
    return int(num_parts)


def table_dtype(num_parts: int) -> torch.dtype:
    """Return the smallest dtype that holds a part."""
    return torch.uint8 if num_parts <= 256 else torch.int16


def _shift(value: Tensor, bits: int, other: Tensor) -> Tensor:
    """Compute `other` xor the logical right shift of `value`."""
    return other ^ ((value >> bits) & ((1 << (64 - bits)) - 1))


FORMAT, VERSION = "pyg_direct.partition", 1
FILE = "manifest.json"


@dataclass
class NodeEntry:
    """A node type: its number of nodes, its book, and files of rows by attribute; `{part}` stands for the folder."""

    name: str
    num_nodes: int
    book: dict[str, Any]
    rows: dict[str, str] = field(default_factory=dict)
    time: str | None = None


@dataclass
class EdgeEntry:
    """A relation: its number of edges, their times and weights, and files of rows by attribute.

    `time` is None, `edge` or `node`: the times by which its rows are sorted.
    """

    name: tuple[str, str, str]
    num_edges: int
    weighted: bool = False
    time: str | None = None
    rows: dict[str, str] = field(default_factory=dict)


@dataclass
class Manifest:
    """Description of a partition on disk.

    Attributes:
        direction: `in`: a part holds the in-edges of its nodes; `out`: their out-edges.
        is_homogeneous: True if the graph has no types; node types and relations are then names only.
        part_nodes: Nodes of each part by type, `[P][T]`.
        part_edges: Edges of each part by relation, `[P][R]`.
    """

    num_parts: int
    method: str
    direction: str
    is_homogeneous: bool
    nodes: list[NodeEntry]
    edges: list[EdgeEntry]
    part_nodes: list[list[int]]
    part_edges: list[list[int]]
    num_cut: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, folder: Path, *, prefix: str = "", progress: bool = True) -> None:
        """Write the manifest. Checksums are added for new files in the folder whose names begin with `prefix`."""
        known = {FILE, "journal.json", *self.files}
        names = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
        new = {name: file for name, file in names.items() if name not in known and name.startswith(prefix)}
        num_bytes = sum(file.stat().st_size for file in new.values())
        with Bar(num_bytes, "partition: checksums", "B", is_shown=progress) as bar:
            for name, file in new.items():
                self.files[name] = describe_file(file, bar)
        write_whole(folder / FILE, self._text())

    @classmethod
    def read(cls, folder: str | PathLike[str]) -> Manifest:
        """Read the manifest of a folder."""
        path = Path(folder) / FILE
        try:
            found = json.loads(path.read_text())
        except OSError as error:
            raise PartitionError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise PartitionError(f"{path} is no JSON: {error}") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise PartitionError(f"{path} must have the format {FORMAT!r}, got {str(found)[:80]!r}")
        if found.get("version") != VERSION:
            raise PartitionError(f"{path} must have version {VERSION}, got {found.get('version')!r}")
        try:
            nodes = [NodeEntry(**entry) for entry in found.pop("nodes")]
            edges = [EdgeEntry(**{**entry, "name": tuple(entry["name"])}) for entry in found.pop("edges")]
            del found["format"], found["version"]
            made = cls(nodes=nodes, edges=edges, **found)
            wrong = made._find_wrong()
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise PartitionError(f"{path} lacks what version {VERSION} holds: {error}") from error
        if wrong:
            raise PartitionError(f"{path} must hold what version {VERSION} does, got {wrong}")
        return made

    def _find_wrong(self) -> str | None:
        """Find a contradiction, for example in a manifest that was edited by hand."""
        for name, counts in (("nodes", self.part_nodes), ("edges", self.part_edges)):
            if len(counts) != self.num_parts:
                return f"{name} of {len(counts)} parts, of {self.num_parts}"
        for number, entry in enumerate(self.nodes):
            kind, bounds = entry.book["kind"], entry.book.get("bounds")
            if kind not in ("hash", "range", "table"):
                return f"a book of kind {kind!r} for nodes {entry.name!r}"
            if kind == "range" and not (isinstance(bounds, list) and all(type(bound) is int for bound in bounds)):
                return f"bounds {bounds!r} for nodes {entry.name!r}"
            if kind == "table" and entry.book["file"] not in self.files:
                return f"a table {entry.book['file']!r} for nodes {entry.name!r}, which is not among the files"
            owned = sum(part[number] for part in self.part_nodes)
            if owned != entry.num_nodes:
                return f"{entry.num_nodes} nodes {entry.name!r}, of which parts have {owned}"
        for number, relation in enumerate(self.edges):
            owned = sum(part[number] for part in self.part_edges)
            if owned != relation.num_edges:
                return f"{relation.num_edges} edges {'__'.join(relation.name)!r}, of which parts have {owned}"
        return None

    def check(self, folder: str | PathLike[str], part: int | None, *, full: bool = True) -> None:
        """Compare files with the manifest.

        Args:
            part: Only the files that this part needs; None for all.
            full: Compare checksums too, which reads the files; otherwise sizes.
        """
        needed = {name: known for name, known in self.files.items() if part is None or _is_needed(name, part)}
        with Bar(sum(known["bytes"] for known in needed.values()), "comparing checksums", "B") as bar:
            for name, known in needed.items():
                path = Path(folder) / name
                if not path.is_file():
                    raise PartitionError(f"{path} is missing; the manifest lists it")
                if path.stat().st_size != known["bytes"]:
                    raise PartitionError(f"{path} must have {known['bytes']} bytes, got {path.stat().st_size}")
                if full and describe_file(path, bar) != known:
                    raise PartitionError(f"{path} does not have the checksum that the manifest lists")

    def identify(self) -> int:
        """Return a number that identifies the partition; replicas of rows do not change it."""
        files = {name: known for name, known in self.files.items() if not name.startswith("replicas-")}
        words = json.dumps(asdict(replace(self, files=files)), sort_keys=True)
        # Non-negative in int64.
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1

    def forget(self, folder: Path, names: str) -> None:
        """Write the manifest without the files whose names begin with `names`: they are about to change."""
        self.files = {name: known for name, known in self.files.items() if not name.startswith(names)}
        write_whole(folder / FILE, self._text())

    def _text(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    def read_book(self, folder: str | PathLike[str], number: int) -> Book:
        """Read the book of a node type."""
        entry = self.nodes[number]
        if entry.book["kind"] == "hash":
            return Book(entry.num_nodes, self.num_parts)
        if entry.book["kind"] == "range":
            return Book(entry.num_nodes, self.num_parts, bounds=torch.tensor(entry.book["bounds"], device="cpu"))
        table = read_array(Path(folder) / entry.book["file"])
        return Book(entry.num_nodes, self.num_parts, table=torch.from_numpy(table))

    def check_part(self, part: Any) -> int:
        """Check the number of a part."""
        if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < self.num_parts:
            raise ArgumentError(f"part must be an integer in [0, {self.num_parts}), got {part!r}")
        return part


def check_same(numbers: Sequence[int], who: str) -> None:
    """Refuse parts of different partitions. `who`: Owners of the parts, for the message."""
    other = next((at for at, number in enumerate(numbers) if number != numbers[0]), None)
    if other is not None:
        raise PartitionError(f"folder must hold parts of one partition, got another for {who} {other} than for {who} 0")


def part_folder(part: int) -> str:
    """Return the name of the folder of a part."""
    return f"part-{part:05d}"


def _is_needed(name: str, part: int) -> bool:
    """Check if a process with one part reads a file: no files of other parts, no names of nodes."""
    folder = name.partition("/")[0]
    own = {"part-": part_folder(part), "replicas-": f"replicas-{part:05d}"}
    is_of_others = any(folder.startswith(begin) and folder != mine for begin, mine in own.items())
    return not is_of_others and not name.startswith("names-")
