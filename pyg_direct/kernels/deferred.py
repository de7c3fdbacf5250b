"""What stands for compilers' objects in the globals of kernels until these are compiled."""

from __future__ import annotations


class Deferred:
    """Stands for a compiler's object in a kernel's globals until that kernel is compiled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, bound when a kernel is compiled>"


class DeviceFunction(Deferred):
    """A C++ function of `cuda_src/`, declared to numba-cuda when a kernel that calls it is compiled."""

    def __init__(self, name: str, signature: str) -> None:
        super().__init__(name)
        self.signature = signature


class SystemFunction(Deferred):
    """A function of the system's C library, found by its name when a loop that calls it is compiled or read."""

    def __init__(self, name: str, signature: str) -> None:
        super().__init__(name)
        self.signature = signature
