"""Memory by address for CPU loops: `prefetch` and `view_words`, as Numba's intrinsics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def make_intrinsics() -> dict[str, Callable[..., Any]]:
    """Make the intrinsics, by name.

    `prefetch(address)` asks for the cache line of an address. It never fails, whatever the address is.
    `view_words(address, count)` is the array of int64 there, which must be valid.
    """
    from llvmlite import ir
    from numba import carray
    from numba.core import cgutils, types
    from numba.extending import intrinsic, register_jitable

    byte, half, word = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64).as_pointer()

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
    def as_pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], word)

        return types.CPointer(types.int64)(types.int64), generate  # type: ignore[attr-defined]

    @register_jitable  # type: ignore[untyped-decorator]
    def view_words(address: Any, count: Any) -> Any:
        return carray(as_pointer(address), count)

    return {"prefetch": prefetch, "view_words": view_words}
