"""Files of a partition: arrays written piece by piece, checksums, and a journal to continue after a crash."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pyg_direct.cache_folder import write_whole
from pyg_direct.errors import NPY, ArgumentError, PartitionError, whole_file
from pyg_direct.progress import Bar

# Bytes read at a time for a checksum.
_BYTES_AT_ONCE = 1 << 22
# The default limit of open files per process is 256 on macOS and 1,024 on Linux.
_MOST_OPEN = 64


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file to errors of the system, which does not name it while it writes."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def create_map(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap:
    """Create a `.npy` file of zeros and map it for writing, with room on the disk for all of it."""
    with named(path):
        array = np.lib.format.open_memmap(path, "w+", dtype, shape)
        # To write to a map without room on the disk would end the process by a signal.
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


class OpenFiles:
    """Files that are appended to, few of them open at once: opening one more closes the least recently used."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def at_end(self, path: Path) -> BinaryIO:
        """Return the existing file, positioned at its end."""
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) >= _MOST_OPEN:
                self.close(next(iter(self._files)))
            file = path.open("r+b")
            file.seek(0, os.SEEK_END)
        self._files[path] = file
        return file

    def close(self, path: Path) -> None:
        """Close the file if it is open."""
        if path in self._files:
            self._files.pop(path).close()


class ArrayFile:
    """File of an array that grows at its end: a `.npy` file of known shape, or items without a header.

    Args:
        shape: Shape of the complete array; None for items without a header.
        length: Rows that it holds already; the remainder is dropped.
        opened: Set of open files; files that are written in turns share one.
    """

    def __init__(self, path: Path, dtype: Any, shape: Sequence[int] | None, length: int = 0,
                 opened: OpenFiles | None = None) -> None:  # fmt: skip
        # Little endian for any given dtype.
        self._path, self._dtype = path, np.dtype(dtype).newbyteorder("<")
        self._opened, self._is_done = opened or OpenFiles(), False
        with named(path), path.open("r+b" if length else "w+b") as file:
            row_bytes = self._dtype.itemsize
            if shape is not None:
                header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False,
                          "shape": tuple(int(size) for size in shape)}  # fmt: skip
                np.lib.format.write_array_header_1_0(file, header)
                row_bytes *= int(np.prod(shape[1:], dtype=np.int64))
            file.truncate(file.tell() + length * row_bytes)

    def append(self, rows: np.ndarray) -> None:
        """Write rows at the end."""
        if len(rows):
            items = np.ascontiguousarray(rows, self._dtype)
            with named(self._path):
                # `tofile` would not say why the system refused.
                self._opened.at_end(self._path).write(items.reshape(-1).view(np.uint8).data)

    def flush(self) -> None:
        """Flush everything to disk, also writes before the file was closed and reopened."""
        with named(self._path):
            file = self._opened.at_end(self._path)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Flush and close."""
        if not self._is_done:
            self._is_done = True
            self.flush()
            self._opened.close(self._path)


@contextmanager
def closing_all(files: Iterable[ArrayFile]) -> Iterator[None]:
    """Close files at the end, even after an error."""
    with ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
        yield


class Journal:
    """Journal of the completed steps of a partition; kept in its folder until it is published.

    Args:
        inputs: Inputs and options of the partition; a folder begun with other inputs is not continued.

    Attributes:
        begun: Work of an earlier run in the folder: `same`, which is continued; `other`, which had other inputs or no
            whole journal, and was deleted; None for no work.
    """

    def __init__(self, folder: Path, inputs: dict[str, Any]) -> None:
        self._path = folder / "journal.json"
        self._entries: dict[str, Any] = {"inputs": inputs}
        self.begun: str | None = None
        if self._path.exists():
            known = _read_entries(self._path)
            if known.get("inputs") == json.loads(json.dumps(inputs)):
                self._entries, self.begun = known, "same"
                return
            self.begun = "other"
        elif any(folder.iterdir()):
            raise ArgumentError(f"out must leave {str(folder)!r} free, which holds files of something else: move them, "
                                "or give out another name")  # fmt: skip
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        self.note("inputs", inputs)

    def get(self, step: str, default: Any = None) -> Any:
        """Return the note of a step."""
        return self._entries.get(step, default)

    def __contains__(self, step: str) -> bool:
        return step in self._entries

    def note(self, step: str, value: Any) -> None:
        """Note the progress of a step."""
        self._entries[step] = value
        write_whole(self._path, json.dumps(self._entries))

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the journal of a published folder."""
        (folder / "journal.json").unlink()


def _read_entries(path: Path) -> dict[str, Any]:
    """Read a journal; empty if a system failure left it incomplete."""
    try:
        known = json.loads(path.read_text())
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def describe_file(path: Path, bar: Bar) -> dict[str, Any]:
    """Return size and checksum of a file, as in a manifest; `bar` counts the bytes read."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_BYTES_AT_ONCE):
            digest.update(piece)
            bar.update(len(piece))
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


# NumPy parses the head of a file by `ast`, which in Python 3.11 fails at times if several threads do so at once.
_READING = threading.Lock()
if hasattr(os, "register_at_fork"):
    # Another thread may hold it when a process is forked.
    os.register_at_fork(after_in_child=lambda: globals().update(_READING=threading.Lock()))


def read_array(path: Path, *, mapped: bool = False) -> np.ndarray:
    """Read the array of a `.npy` file, numbers only."""
    with whole_file(path.name, NPY, path, PartitionError), _READING:
        array: Any = np.load(path, allow_pickle=False, mmap_mode="c" if mapped else None)
    if not isinstance(array, np.ndarray):
        array.close()
        raise PartitionError(f"{path} must hold an array of numbers, got an archive")
    if array.dtype.kind not in "biufc":
        raise PartitionError(f"{path} must hold an array of numbers, got {array.dtype}")
    return array


class _Written:
    """A file that is only written to, through Python."""

    def __init__(self, file: BinaryIO) -> None:
        self.write = file.write


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a `.npy` file and flush it to disk."""
    with named(path), path.open("wb") as file:
        # NumPy writes to a file by itself, and then does not say why the system refused.
        np.lib.format.write_array(_Written(file), array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
