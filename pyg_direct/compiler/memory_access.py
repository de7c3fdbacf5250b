"""Memory by address for CPU loops: `prefetch` and `read_word`, as Numba's intrinsics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def make_intrinsics() -> dict[str, Callable[..., Any]]:
    """Make the intrinsics, by name.

    `prefetch(address)` asks for the cache line of an address. It never fails, whatever the address is.
    `read_word(address)` reads the int64 at an address, which must be valid.
    """
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    byte, half = ir.IntType(8).as_pointer(), ir.IntType(32)

    @intrinsic  # type: ignore[untyped-decorator]
    def prefetch(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [byte, half, half, half])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            # A read of data that is soon read again.
            builder.call(function, [builder.inttoptr(args[0], byte), half(0), half(3), half(1)])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def read_word(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

        return types.int64(types.int64), generate

    return {"prefetch": prefetch, "read_word": read_word}
