"""`Manifest`: the description of a partition on disk. `FORMAT.md` beside this file specifies the format.

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

import torch

from pyg_direct.cache_folder import write_whole
from pyg_direct.distributed.partitioning.files import describe_file, read_array
from pyg_direct.distributed.partitioning.partition_book import Book
from pyg_direct.errors import ArgumentError, PartitionError
from pyg_direct.progress import Bar

FORMAT, VERSION = "pyg_direct.partition", 1
FILE = "manifest.json"


@dataclass
class NodeEntry:
    """A node type: its number of nodes, its book, and files of rows by attribute (`{part}` is replaced by the
    folder).
    """

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
        num_parts: Number of parts P.
        method: Method that assigned nodes to parts.
        direction: `in`: a part holds the in-edges of its nodes; `out`: their out-edges.
        is_homogeneous: True if the graph has no types; node types and relations are then names only.
        nodes, edges: Node types and relations, in order.
        part_nodes: Nodes of each part by type, `[P][T]`.
        part_edges: Edges of each part by relation, `[P][R]`.
        num_cut: Edges whose ends belong to different parts.
        files: Size and checksum of every file.
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
        """Read the manifest of a folder.

        Raises:
            PartitionError: the manifest is missing, or of another format or version.
        """
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
            folder: The partition.
            part: Only the files that this part needs; None for all.
            full: Compare checksums too, which reads the files; otherwise sizes.

        Raises:
            PartitionError: a file is missing, has another size, or other contents.
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
    """Refuse parts of different partitions.

    Args:
        numbers: Results of `Manifest.identify`, one per part.
        who: Owners of the parts, for the message.
    """
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
