"""Checks of arguments, and the random generator that a seed and a purpose stand for."""

from __future__ import annotations

import hashlib
import math
from numbers import Integral, Real
from typing import Any

import torch

from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError


def check_int(name: str, value: Any, *, least: int) -> int:
    """`value` as an int; raises unless it is an integer of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ArgumentError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_number(name: str, value: Any) -> float:
    """`value` as a float; raises unless it is a real number, infinity and nan included."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def check_positive(name: str, value: Any) -> float:
    """`value` as a float; raises unless it is finite and above 0."""
    number = check_number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ArgumentError(f"{name} must be a finite number above 0, got {value}")
    return number


def check_not_negative(name: str, value: Any) -> float:
    """`value` as a float; raises unless it is finite and at least 0."""
    number = check_number(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise ArgumentError(f"{name} must be a finite number of at least 0, got {value}")
    return number


def check_fraction(name: str, value: Any) -> float:
    """`value` as a float; raises unless it lies in [0, 1]."""
    number = check_number(name, value)
    if not 0 <= number <= 1:
        raise ArgumentError(f"{name} must lie between 0 and 1, got {value}")
    return number


def check_float_dtype(name: str, value: Any) -> torch.dtype:
    """`value` itself; raises unless it is a floating-point torch dtype."""
    if not isinstance(value, torch.dtype):
        raise ArgumentTypeError(f"{name} must be a torch.dtype, got {value!r}")
    if not value.is_floating_point:
        raise ArgumentError(f"{name} must be a floating-point dtype, got {value}")
    return value


def check_device(name: str, value: Any) -> torch.device:
    """`value` as a device of this machine; None is the current GPU if there is one, else the CPU."""
    if value is None:
        value = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(value)
    except TypeError as error:
        raise ArgumentTypeError(f"{name} must be a torch device or its name, got {value!r}") from error
    except RuntimeError as error:
        raise ArgumentError(f"{name} must name a torch device, got {value!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{name} must be the CPU or a CUDA device, got {value!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"{name} must be a device of this machine, got {value!r}: torch sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return device


def make_generator(seed: int, purpose: str, device: torch.device) -> torch.Generator:
    """Generator for one `purpose`, say "edges", of one `seed`; what one purpose draws moves no other."""
    # hashed, because torch's CPU generator reads 32 bits of its seed only
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
