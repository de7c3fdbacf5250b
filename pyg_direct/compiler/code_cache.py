"""Compiled code on disk: one folder for each state of the sources and each version of the compilers.

A wheel also holds the PTX of every foreseen specialisation. It was compiled when the wheel was built and lies in
one archive (`ARCHIVE`) beside this module.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

from pyg_direct.cache_folder import cache_root, hold, write_whole

COMPILER = os.environ.get("PYG_DIRECT_COMPILER", "")
_PACKAGES = ("numba", "numba-cuda", "numba-cuda-mlir", "llvmlite", "numpy", "nvidia-nvvm", "nvidia-cuda-nvrtc",
             "nvidia-nvjitlink")  # fmt: skip


def _find_folder(level: int, name: str) -> Path | zipfile.Path:
    """Find the folder so many levels above this file; if the package is imported from an archive, it lies there."""
    folder, archive = Path(__file__).parents[level] / name, getattr(__spec__.loader, "archive", None)
    return folder if archive is None else zipfile.Path(archive, f"{folder.relative_to(archive).as_posix()}/")


def source_folder() -> Path | zipfile.Path:
    """Find `cuda_src/`: inside the installed package, or beside it in a checkout."""
    inside = _find_folder(1, "cuda_src")
    return inside if inside.exists() else _find_folder(2, "cuda_src")


def read_sources(folder: Path | zipfile.Path, *endings: str) -> dict[str, bytes]:
    """Read the files below a folder with such endings: by path from there, in alphabetical order."""
    found: dict[str, bytes] = {}
    for file in folder.iterdir() if folder.exists() else ():
        if file.name == "__pycache__":
            # Python makes these of the sources, now or later.
            continue
        if file.is_dir():
            found |= {f"{file.name}/{name}": text for name, text in read_sources(file, *endings).items()}
        elif file.name.endswith(endings):
            found[file.name] = file.read_bytes()
    return dict(sorted(found.items()))


@functools.cache
def source_digest() -> str:
    """Digest of the kernels' sources, different for each state of them."""
    digest = hashlib.sha256()
    # A package may be shipped as bytecode alone.
    rooms = [read_sources(_find_folder(1, room), ".py", ".pyc") for room in ("compiler", "kernels")]
    for name, text in chain(*[room.items() for room in rooms], read_sources(source_folder(), ".cu", ".cuh").items()):
        digest.update(name.encode() + b"\0" + text)
    return digest.hexdigest()


def cache_name() -> str:
    """Name of the folder of compiled code of these sources and compilers."""
    import importlib.metadata as metadata

    digest = hashlib.sha256(f"{source_digest()}{COMPILER}".encode())
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            digest.update(f"{package}{metadata.version(package)}".encode())
    return digest.hexdigest()[:16]


@functools.cache
def cache_folder(kind: str) -> Path:
    """Folder of compiled code; a temporary one, deleted with the process, if the usual one is missing."""
    folder = _usual_folder(kind)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    # Code is read from a folder that cannot be written, as of a container's image.
    # `Path.is_dir` would raise for one below a folder of somebody else's.
    if os.path.isdir(folder) and os.access(folder, os.R_OK):
        return folder
    from multiprocessing.util import Finalize

    folder = Path(tempfile.mkdtemp(prefix="pyg_direct"))
    # Processes of multiprocessing end without `atexit`, and a forked process must leave the folder to its parent.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)
    return folder


def _usual_folder(kind: str) -> Path:
    return cache_root() / cache_name() / kind


def find_unwritable(kind: str) -> Path | None:
    """Report the folder of compiled code if it cannot be written, so that other processes compile again."""
    folder = _usual_folder(kind)
    return None if os.path.isdir(folder) and os.access(folder, os.W_OK) else folder


def place_source(fn: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Return a function of the kernels as if it came from a copy of its file in the folder of compiled code.

    Numba distinguishes functions by the path of their file: each environment with the same sources would compile them.
    """
    source, room = Path(fn.__code__.co_filename), Path(__file__).parents[1] / "kernels"
    if not source.is_relative_to(room):
        # No part of the digest.
        return fn
    copy = folder / "sources" / source.relative_to(room)
    try:
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_whole(copy, source.read_text())
    except OSError:
        # Without room on the disk, nothing is kept.
        return fn
    code = fn.__code__.replace(co_filename=str(copy))
    return FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def read_or_make(path: Path, make: Callable[[], str]) -> str:
    """Read a text that the first process to want it makes while others wait; it is made anew if it is not kept."""
    with contextlib.suppress(OSError):
        return path.read_text()
    with hold(path):
        with contextlib.suppress(OSError):
            return path.read_text()
        text = make()
        with contextlib.suppress(OSError):
            write_whole(path, text)
    return text


ARCHIVE = Path(__file__).with_name("ptx.zip")


@functools.cache
def _open_archive() -> zipfile.ZipFile | None:
    if COMPILER or not ARCHIVE.exists():
        return None
    # In memory, since forked processes would share the place in an open file.
    archive = zipfile.ZipFile(io.BytesIO(ARCHIVE.read_bytes()))
    # If sources were edited since, the code compiled from them before does not count.
    return archive if archive.comment.decode() == source_digest() else None


def find_shipped(name: str) -> str | None:
    """Find PTX by the name of its specialisation; None if the wheel has none that is current with the sources."""
    archive = _open_archive()
    return archive.read(name).decode() if archive is not None and name in archive.namelist() else None


def write_archive(path: Path, texts: Mapping[str, str]) -> None:
    """Write the archive of the sources as they are now; equal texts give equal bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = source_digest().encode()
        for name in sorted(texts):
            archive.writestr(zipfile.ZipInfo(name), texts[name], zipfile.ZIP_DEFLATED, compresslevel=9)
