"""What is kept on disk between runs: where it lies, how it is written, and facts that were measured once."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Longer than any kernel compiles, and anything is measured: who waited that long does it too.
_PATIENCE_SECONDS = 120.0


def cache_root() -> Path:
    """The package's folder for what can be made again: `PYG_DIRECT_CACHE`, or `pyg_direct` in the user's caches."""
    if own := os.environ.get("PYG_DIRECT_CACHE"):
        return Path(_settle(own))
    # As its specification has it, one that is relative says nothing.
    caches = os.environ.get("XDG_CACHE_HOME", "")
    caches = caches if os.path.isabs(caches) else os.path.join(_find_home(), ".cache")
    return Path(caches) / "pyg_direct"


@functools.cache
def _settle(folder: str) -> str:
    """Where a folder was when it was first asked for: programs change the one that they are in."""
    return os.path.abspath(os.path.expanduser(folder))


def _find_home() -> str:
    """The user's folder; the root, as in containers, where nobody knows the user."""
    home = os.path.expanduser("~")
    return home if os.path.isabs(home) else os.path.abspath(os.sep)


def open_beside(path: Path) -> tuple[int, str]:
    """(handle, name) of a new file in the folder of another, which it is to replace; as `tempfile.mkstemp`, but with
    the rights that `open` gives, which the umask and the folder have a say in.

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
        OSError: there is no room, or no right to write there.
    """
    handle, name = open_beside(path)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keep other processes from what belongs to `path`; ends with the process, however that ends.

    Where there can be no lock (a folder that cannot be written, a full disk), work is done twice rather than not.
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
    """Have the disk keep what was renamed in a folder, where the system opens folders: Windows does not."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def recall(kind: str, key: str, measure: Callable[[], Any], is_valid: Callable[[Any], bool]) -> Any:
    """A measured fact: as it was kept, or measured now and kept, by one process while others wait.

    Args:
        kind: The file it is kept in, `<kind>.json` in the package's folder.
        key: What it depends on, such as the GPU's model and the driver.
        measure: Measures it; the result must be what JSON can hold.
        is_valid: Whether a value that was kept may be used; another program may have written it.
    """
    path = cache_root() / f"{kind}.json"
    known = _read(path)
    if key in known and is_valid(known[key]):
        return known[key]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    # Those of a host that measure at once are in each other's way, and what they find is kept.
    with hold(path):
        known = _read(path)
        if key in known and is_valid(known[key]):
            return known[key]
        value = measure()
        # Without a place to keep it, the next process measures it again. Where there was no lock, others may have
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
