"""Errors of commands: options as users type them, files that cannot be written, packages that are missing."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer

from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError, FileError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def said_in_options(context: typer.Context) -> Iterator[None]:
    """Report arguments that the package refuses as bad usage, under the names of the command's options."""
    try:
        yield
    except FileError:
        raise
    except (ArgumentError, ArgumentTypeError, DeviceError) as error:
        raise typer.BadParameter(name_options(str(error), list_options(context))) from error


def list_options(context: typer.Context) -> dict[str, str]:
    """List the parameters of a command, by name, as users type them."""
    found = {}
    for parameter in context.command.params:
        longest = max(parameter.opts, key=len)
        is_option = longest.startswith("-")
        found[str(parameter.name)] = longest if is_option else (parameter.metavar or longest).upper()
    return found


def name_options(message: str, options: Mapping[str, str]) -> str:
    """Write parameters in a message as options.

    A name that is also a word of English, such as `memory`, is replaced if it begins the message or has a value.

    Args:
        options: By name of the parameter, as users type it.
    """
    for name, option in options.items():
        place = r"\b{}\b" if "_" in name else r"^{}\b(?= must|=|\[)|\b{}(?==)"
        message = re.sub(place.replace("{}", re.escape(name)), option.replace("\\", r"\\"), message)
    return message


def explain_write(error: OSError, path: str | os.PathLike[str], instead: str) -> str:
    """Name the file that could not be written, the reason, and the remedy.

    Args:
        error: The error of the system; the file that it names counts.
        instead: Option that takes another place, such as `--out`.
    """
    file = Path(os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else path)
    if isinstance(error, FileError) and error.errno is None:
        return str(error)
    why = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _NO_ROOM:
        return (f"{file} cannot be written: the disk is full ({why}), {_count_free(file)}. Delete files there, or give "
                f"{instead} a folder on another disk")  # fmt: skip
    if error.errno in _NO_RIGHTS:
        return (f"{file} cannot be written: this user has no right to write there ({why}). Change the rights of "
                f"{_find_parent(file)}, or give {instead} a folder of your own")  # fmt: skip
    return f"{file} cannot be written: {why}. Give {instead} another place"


def _find_parent(path: Path) -> Path:
    """Find the nearest folder above a path that exists."""
    folder = path.absolute().parent
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _count_free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(_find_parent(path)).free / 1e6:.1f} MB are free"
    except OSError:
        return "and its free space is unknown"


def explain_missing(error: ModuleNotFoundError) -> str | None:
    """Say how to install a package that this one needs; None if the package is not one of these."""
    package = (error.name or "").partition(".")[0]
    if package not in ("torch", "torch_geometric", "numba", "numpy", "psutil", "tqdm", "filelock", "packaging"):
        return None
    from importlib import metadata

    wanted = package
    try:
        for text in metadata.requires("pyg_direct") or []:
            requirement = text.partition(";")[0].strip()
            if re.match(rf"{package}(?![\w-])", requirement.replace("-", "_")):
                wanted = requirement
    except metadata.PackageNotFoundError:
        # Run from a checkout that is not installed.
        pass
    where = "; torch first needs the build for your CUDA: https://pytorch.org/get-started/locally"
    return f"{package} is not installed: pip install '{wanted}'{where if package == 'torch' else ''}"
