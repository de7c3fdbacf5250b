"""Exceptions and warnings of pyg_direct; each message names the argument, the rule and the value."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any


class PygDirectError(Exception):
    """Base of every exception raised by this package."""


class ArgumentError(PygDirectError, ValueError):
    """An argument has the right type but a value outside its rule."""


class ArgumentTypeError(PygDirectError, TypeError):
    """An argument has the wrong type or dtype."""


class IdError(ArgumentError, IndexError):
    """A node or edge id lies outside its graph or table."""


class DeviceError(PygDirectError, RuntimeError):
    """The requested device is missing or lacks an ability that is needed."""


class CudaError(PygDirectError, RuntimeError):
    """A CUDA driver call returned an error code."""

    def __init__(self, call: str, code: int, name: str, detail: str) -> None:
        super().__init__(f"{call} returned {name} ({code}): {detail}")
        self.call, self.code, self.name = call, code, name


class MemoryLimitError(PygDirectError, MemoryError):
    """An allocation, a cache or a plan does not fit the requested memory."""


class ForkedProcessError(PygDirectError, RuntimeError):
    """A forked child touched GPU-visible host memory, which would end the process by SIGBUS."""


class FileError(PygDirectError, OSError):
    """A file of rows has changed or does not match its description, or there is no room for it."""


class PlacementWarning(UserWarning):
    """Memory was placed in another place than requested; the message says why."""


class LoaderWarning(UserWarning):
    """A loader argument was accepted but has no effect here; the message says why."""


class PartitionError(PygDirectError, ValueError):
    """A partition on disk is missing, damaged, or of another version; the message names the file."""


class RankError(PygDirectError, RuntimeError):
    """Another process of the group failed or is gone; the message names its rank."""


@contextlib.contextmanager
def needs_extra(what: str, *extras: str) -> Iterator[None]:
    """Import packages of an extra in the block; if one is missing, the error says how to install it.

    Args:
        what: Name of the feature that needs them.
        extras: The extra, or extras of which one will do.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # Packages of other extras that this extra needs.
        extras = ("sparse",) if error.name in ("torch_scatter", "torch_sparse") else extras
        choices = " or ".join(f'pip install ".[{extra}]"' for extra in extras)
        raise ModuleNotFoundError(f"{what} needs the package {error.name}: {choices} in the clone of pyg_direct",
                                  name=error.name) from error  # fmt: skip


# Errors that NumPy, pyarrow and `zipfile` raise for files that are cut short, overwritten, or of another kind.
_DAMAGES = (EOFError, OSError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)
# Words for a file of numbers in messages about damage.
NPY, NPZ, PARQUET = "NumPy array (.npy) of numbers", "NumPy archive (.npz) of numbers", "parquet file"
# Files of this package, and those through which a decorated function of it is called.
_INSIDE = (os.path.join(os.path.dirname(os.path.abspath(__file__)), ""), contextlib.__file__)


@contextlib.contextmanager
def whole_file(name: str, kind: str, file: str | os.PathLike[str], error: type[PygDirectError] = ArgumentError
               ) -> Iterator[None]:  # fmt: skip
    """Name the damaged file if a library raises while reading it; such errors seldom name the file.

    Args:
        name: The argument that holds the file, or the file's name.
        kind: Format that the file must have, such as `NPY`.

    Raises:
        PygDirectError: `error`; errors of this package pass through unchanged.
    """
    try:
        yield
    except PygDirectError:
        raise
    except _DAMAGES as cause:
        raise error(f"{name} must be a whole {kind}, got {os.fspath(file)!r}, which says: {cause}") from cause


def describe(error: Exception) -> str:
    """Return the first line of an error's message; without a message, the name of its class."""
    return (str(error) or type(error).__name__).splitlines()[0]


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line outside of this package that led here, however deep below it the cause was found."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_unused(given: Mapping[str, Any], reason: str) -> None:
    """Warn once about arguments that PyG or torch take, and that have no effect here.

    Args:
        given: The arguments by name; if it is empty, there is no warning.
        reason: Why they have no effect, to follow "not used, as".
    """
    if given:
        shown = ", ".join(
            f"{name}={getattr(value, '__qualname__', None) or repr(value)}" for name, value in given.items()
        )
        warn(f"{shown}: not used, as {reason}", LoaderWarning)
