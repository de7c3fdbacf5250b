"""What is declared of a GPU kernel: its parameters by dtype code, and the specialisations that are foreseen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """One parameter of a GPU kernel: a scalar code such as `i8`, or a 1-D array of it (`is_array`)."""

    code: str
    is_array: bool


@dataclass(frozen=True)
class GpuCode:
    """PTX of one specialisation of a kernel, with the C++ functions it calls already inside."""

    ptx: str

    @property
    def entry(self) -> str:
        """Name of the kernel in its PTX."""
        return self.ptx.split(".entry", 1)[1].split("(", 1)[0].strip()


class Declaration:
    """Name and parameters of a GPU kernel.

    The signature lists parameters by code: `i8` is an int64 scalar, `i8[]` a contiguous 1-D int64 array; a
    capital letter (`I[]`) is a dtype that differs between specialisations, each listed in `variants`.
    """

    def __init__(self, name: str, signature: str, variants: Mapping[str, Sequence[str]]) -> None:
        self.name = name
        self.signature = signature.split()
        self.variants = {letter: tuple(codes) for letter, codes in variants.items()}

    def specialisations(self) -> Iterator[dict[str, str]]:
        """All declared choices of a dtype for each letter."""
        chosen: list[dict[str, str]] = [{}]
        for letter, codes in self.variants.items():
            chosen = [{**c, letter: code} for c in chosen for code in codes]
        return iter(chosen)

    def parameters(self, choice: Mapping[str, str]) -> list[Parameter]:
        """Parameters with every letter replaced by its chosen code."""
        tokens = [(t.removesuffix("[]"), t.endswith("[]")) for t in self.signature]
        return [Parameter(choice.get(code, code), is_array) for code, is_array in tokens]

    def choose(self, dtypes: Sequence[str]) -> dict[str, str]:
        """The specialisation for the dtype codes of actual arguments, in order."""
        choice: dict[str, str] = {}
        for token, code in zip(self.signature, dtypes, strict=True):
            letter = token.removesuffix("[]")
            if letter in self.variants:
                first = choice.setdefault(letter, code)
                assert first == code, f"{self.name}: {letter} is {first} and {code}"
                assert code in self.variants[letter], f"{self.name}: {letter} has no variant {code}"
        return choice

    def file_name(self, target: tuple[int, int], choice: Mapping[str, str]) -> str:
        """Name of the file that holds the PTX of a specialisation for an architecture."""
        choices = (f"{letter}{code}" for letter, code in sorted(choice.items()))
        return "-".join([self.name, *choices, "sm{}{}".format(*target)]) + ".ptx"
