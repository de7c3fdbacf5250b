"""Files kept on disk between runs: their folder, atomic writes, and facts that are measured once."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Longer than any kernel compiles and any fact is measured; after such a wait the process does the work itself.
_PATIENCE_SECONDS = 120.0


def cache_root() -> Path:
    """Return the folder of files that can be made again: `PYG_DIRECT_CACHE`, or `pyg_direct` in the user's caches."""
    if own := os.environ.get("PYG_DIRECT_CACHE"):
        return Path(_settle(own))
    # The XDG specification ignores relative paths.
    caches = os.environ.get("XDG_CACHE_HOME", "")
    caches = caches if os.path.isabs(caches) else os.path.join(_find_home(), ".cache")
    return Path(caches) / "pyg_direct"


@functools.cache
def _settle(folder: str) -> str:
    """Return the absolute path of a folder as of the first request, because programs change the working directory."""
    return os.path.abspath(os.path.expanduser(folder))


def _find_home() -> str:
    """Return the home folder; the root if the user is unknown, as in containers."""
    home = os.path.expanduser("~")
    return home if os.path.isabs(home) else os.path.abspath(os.sep)


def open_beside(path: Path) -> tuple[int, str]:
    """Create a file in the folder of another, which it is to replace; return (handle, name). Like `tempfile.mkstemp`,
    but with the rights that `open` gives: the umask and the folder apply.

    Raises:
        OSError: there is no right to write there.
    """
    while True:
        name = os.path.join(path.parent, f".{path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileExistsError):
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666), name


def write_whole(path: Path, text: str) -> None:
    """Write a file so that other processes see all of it or none of it, with the rights that `open` gives a new one.

    Raises:
        OSError: there is no room, or no right to write there; the error names the file.
    """
    name = None
    try:
        handle, name = open_beside(path)
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        if isinstance(error, OSError):
            # Not the file beside it, nor an empty one, as if the disk were full.
            error.filename, error.filename2 = str(path), None
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
        raise


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Lock out other processes from everything that belongs to `path`; the lock ends with the process, however it ends.

    If there can be no lock (a read-only folder, a full disk), work may be done twice, but is not refused.
    """
    from filelock import FileLock

    lock = FileLock(f"{path}.lock", timeout=_PATIENCE_SECONDS)
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def sync_folder(folder: Path) -> None:
    """Make the disk keep renames in a folder, on systems that can open folders (Windows cannot)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def recall(kind: str, key: str, measure: Callable[[], Any], is_valid: Callable[[Any], bool]) -> Any:
    """Return a measured fact from the cache, or measure it now and cache it; other processes wait meanwhile.

    Args:
        kind: The file it is kept in, `<kind>.json` in the package's folder.
        key: Conditions of the measurement, such as the GPU's model and the driver.
        measure: Measures the fact; the result must be JSON.
        is_valid: Reports whether a cached value may be used; another program may have written it.
    """
    path = cache_root() / f"{kind}.json"
    known = _read(path)
    if key in known and is_valid(known[key]):
        return known[key]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    # Processes of a host that measure at once disturb each other, and their result would be cached.
    with hold(path):
        known = _read(path)
        if key in known and is_valid(known[key]):
            return known[key]
        value = measure()
        # Without a folder to write to, the next process measures again. Without a lock, another process may have
        # written meanwhile.
        with contextlib.suppress(OSError):
            write_whole(path, json.dumps({**_read(path), key: value}, indent=1))
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
