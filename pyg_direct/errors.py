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
    """The device asked for is missing or cannot do what is asked."""


class CudaError(PygDirectError, RuntimeError):
    """A CUDA driver call returned an error code."""

    def __init__(self, call: str, code: int, name: str, detail: str) -> None:
        super().__init__(f"{call} returned {name} ({code}): {detail}")
        self.call, self.code, self.name = call, code, name


class MemoryLimitError(PygDirectError, MemoryError):
    """An allocation, a cache or a plan does not fit where it was asked to live."""


class ForkedProcessError(PygDirectError, RuntimeError):
    """GPU-visible host memory was touched from a forked child, where it would end the process by SIGBUS."""


class FileError(PygDirectError, OSError):
    """A file of rows is not, or no longer, what it says it is, or there is no room for it."""


class PlacementWarning(UserWarning):
    """Memory was placed somewhere else than asked; the message says why."""


class LoaderWarning(UserWarning):
    """A loader argument was accepted but has no effect here; the message says why."""


class PartitionError(PygDirectError, ValueError):
    """A partition on disk is missing, damaged, or of another version; the message names the file."""


class RankError(PygDirectError, RuntimeError):
    """Another process of the group failed or is gone; the message names its rank."""


@contextlib.contextmanager
def needs_extra(what: str, *extras: str) -> Iterator[None]:
    """Import packages of an extra inside; where one is missing, the error says how to install it.

    Args:
        what: What needs them.
        extras: The extra, or extras of which one will do.

    Raises:
        ModuleNotFoundError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # What packages of other extras need of that.
        extras = ("sparse",) if error.name in ("torch_scatter", "torch_sparse") else extras
        choices = " or ".join(f'pip install ".[{extra}]"' for extra in extras)
        raise ModuleNotFoundError(f"{what} needs the package {error.name}: {choices} in the clone of pyg_direct",
                                  name=error.name) from error  # fmt: skip


# What NumPy, pyarrow and `zipfile` raise for files that are cut short, overwritten, or of another kind.
_DAMAGES = (EOFError, OSError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)
# What files of numbers are called where one is damaged.
NPY, NPZ, PARQUET = "NumPy array (.npy) of numbers", "NumPy archive (.npz) of numbers", "parquet file"
# Files of this package, and those through which a decorated function of it is called.
_INSIDE = (os.path.join(os.path.dirname(os.path.abspath(__file__)), ""), contextlib.__file__)


@contextlib.contextmanager
def whole_file(name: str, kind: str, file: str | os.PathLike[str], error: type[PygDirectError] = ArgumentError
               ) -> Iterator[None]:  # fmt: skip
    """Tell which file is damaged where a library that reads it raises; such errors seldom name it.

    Args:
        name: The argument that the file is, or its own name.
        kind: What the file must be, such as `NPY`.
        file: Its path.
        error: What to raise.

    Raises:
        PygDirectError: `error`; those of this package pass.
    """
    try:
        yield
    except PygDirectError:
        raise
    except _DAMAGES as cause:
        raise error(f"{name} must be a whole {kind}, got {os.fspath(file)!r}, which says: {cause}") from cause


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line outside of this package that led here, however deep below it the cause was found."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_unused(given: Mapping[str, Any], reason: str) -> None:
    """Warn once about arguments that PyG or torch take, and that have no effect here.

    Args:
        given: The arguments by name; if there are none, nothing is said.
        reason: Why they have no effect, to follow "not used, as".
    """
    if given:
        shown = ", ".join(
            f"{name}={getattr(value, '__qualname__', None) or repr(value)}" for name, value in given.items()
        )
        warn(f"{shown}: not used, as {reason}", LoaderWarning)
