"""Options of a subject, the rules between them, and rows of options in which every pair of values meets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations, product
from random import Random

Row = dict[str, str]
# Names of options, and whether their values may stand together.
Rule = tuple[tuple[str, ...], Callable[..., bool]]
# ((option, value), (option, value)), in the order of the options.
Pair = tuple[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True)
class Space:
    """Options with their values, as words; and rules, each with the options that it concerns."""

    options: Mapping[str, tuple[str, ...]]
    rules: tuple[Rule, ...] = ()

    def allows(self, row: Row) -> bool:
        """Whether no rule speaks against the options that are set."""
        return self._keep(row, self.rules)

    @staticmethod
    def _keep(row: Row, rules: Iterable[Rule]) -> bool:
        return all(holds(*[row[name] for name in names]) for names, holds in rules
                   if all(name in row for name in names))  # fmt: skip

    @cached_property
    def _rules_between(self) -> dict[str, dict[str, list[Rule]]]:
        """The rules that concern an option and another one."""
        found: dict[str, dict[str, list[Rule]]] = {name: {} for name in self.options}
        for rule in self.rules:
            for name, other in permutations(rule[0], 2):
                found[name].setdefault(other, []).append(rule)
        return found

    @cached_property
    def bound_first(self) -> list[str]:
        """Options, those that rules concern first, so that what contradicts is met early."""
        bound = {name for names, _ in self.rules for name in names}
        return sorted(self.options, key=lambda name: name not in bound)

    def complete(self, row: Row, order: Callable[[str, Row], Iterable[str]]) -> Row | None:
        """A whole row that holds `row`, values tried in their `order`; None where there is none."""
        left = {name: [value for value in self.options[name] if self.allows({**row, name: value})]
                for name in self.bound_first if name not in row}  # fmt: skip
        return self._extend(row, left, order) if self.allows(row) and all(left.values()) else None

    def _extend(self, row: Row, left: Mapping[str, list[str]], order: Callable[[str, Row], Iterable[str]]
                ) -> Row | None:  # fmt: skip
        """A whole row; `left` has the values that stand with `row`, of each option that is not set."""
        if not left:
            return row
        # The one with the fewest: where none is left for an option, few others were set in vain.
        name = min(left, key=lambda name: len(left[name]))
        for value in order(name, row):
            if value in left[name]:
                longer, rest = {**row, name: value}, {other: left[other] for other in left if other != name}
                for other, rules in self._rules_between[name].items():
                    if other in rest:
                        rest[other] = [one for one in rest[other] if self._keep({**longer, other: one}, rules)]
                whole = self._extend(longer, rest, order) if all(rest.values()) else None
                if whole is not None:
                    return whole
        return None

    def draw(self, random: Random, row: Row | None = None) -> Row | None:
        """A random row that holds `row`."""
        return self.complete(row or {}, lambda name, _: random.sample(self.options[name], len(self.options[name])))

    def pairs_of(self, row: Row) -> list[Pair]:
        """The pairs that meet in a row."""
        items = [(name, row[name]) for name in self.options if name in row]
        return list(combinations(items, 2))

    @cached_property
    def pairs(self) -> frozenset[Pair]:
        """Every pair that some row holds."""
        random, found = Random(0), set()
        for a, b in combinations(self.options, 2):
            for pair in product([(a, value) for value in self.options[a]], [(b, value) for value in self.options[b]]):
                if pair not in found:
                    found.update(self.pairs_of(self.draw(random, dict(pair)) or {}))
        return frozenset(found)

    def cover(self, random: Random, pairs: Iterable[Pair]) -> Iterator[Row]:
        """Rows in which all these pairs meet, most of them early."""
        missing = set(pairs)

        def best_first(name: str, row: Row) -> list[str]:
            def gain(value: str) -> tuple[int, float]:
                new = self.pairs_of({**row, name: value})
                return sum(pair in missing for pair in new), random.random()

            return sorted(self.options[name], key=gain, reverse=True)

        while missing:
            row = self.complete(dict(random.choice(sorted(missing))), best_first)
            assert row is not None
            missing.difference_update(self.pairs_of(row))
            yield row


# Values of options that make no batch.
NOTHING = frozenset({"empty", "nobody"})


@dataclass
class Tally:
    """What was run of a subject: cases, batches compared, how often each pair met, seconds."""

    space: Space
    cases: int = 0
    batches: int = 0
    seconds: float = 0.0
    met: Counter[Pair] = field(default_factory=Counter)

    def add(self, row: Row, batches: int, seconds: float) -> None:
        """Count a case that ended well."""
        self.cases, self.batches, self.seconds = self.cases + 1, self.batches + batches, self.seconds + seconds
        if batches or not NOTHING.isdisjoint(row.values()):
            self.met.update(self.space.pairs_of(row))

    @property
    def missing(self) -> frozenset[Pair]:
        """Pairs that have not met."""
        return self.space.pairs - self.met.keys()

    def endless_rows(self, random: Random) -> Iterator[Row]:
        """Rows in which every pair meets, then those for pairs that met in no batch, then rows for all pairs again."""
        while True:
            yield from self.space.cover(random, self.missing or self.space.pairs)

    def count_by(self, option: str) -> dict[str, tuple[int, int, int]]:
        """For each value of an option: pairs of it with another value that met, all of them, and how often the rarest
        did.
        """
        found: dict[str, list[int]] = {value: [] for value in self.space.options.get(option, ())}
        for pair in self.space.pairs:
            for name, value in pair:
                if name == option:
                    found[value].append(self.met[pair])
        return {value: (sum(count > 0 for count in met), len(met), min(met, default=0)) for value, met in found.items()}

    def summarise(self) -> dict[str, float]:
        """Figures for a table."""
        met = [self.met[pair] for pair in self.space.pairs]
        return {"cases": self.cases, "batches": self.batches, "options": len(self.space.options),
                "pairs": len(met), "pairs met": sum(count > 0 for count in met), "least often": min(met, default=0),
                "seconds": round(self.seconds, 1)}  # fmt: skip
