"""PTX of every foreseen specialisation, compiled when the wheel was built: one archive beside the kernels."""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from pyg_direct.kernels.cache import COMPILER, source_digest

ARCHIVE = Path(__file__).with_name("ptx.zip")


@functools.cache
def _open_archive() -> zipfile.ZipFile | None:
    if COMPILER or not ARCHIVE.exists():
        return None
    # In memory, since forked processes would share the place in an open file.
    archive = zipfile.ZipFile(io.BytesIO(ARCHIVE.read_bytes()))
    # Sources that were edited since count, not what was compiled from them before.
    return archive if archive.comment.decode() == source_digest() else None


def find_shipped(name: str) -> str | None:
    """PTX by the name of its specialisation; None where the wheel has none that is current with the sources."""
    archive = _open_archive()
    return archive.read(name).decode() if archive is not None and name in archive.namelist() else None


def write_archive(path: Path, texts: Mapping[str, str]) -> None:
    """Write the archive of the sources as they are now; equal texts give equal bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = source_digest().encode()
        for name in sorted(texts):
            archive.writestr(zipfile.ZipInfo(name), texts[name], zipfile.ZIP_DEFLATED, compresslevel=9)
