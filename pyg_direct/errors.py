"""Exceptions and warnings of pyg_direct; each message names the argument, the rule and the value."""


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
