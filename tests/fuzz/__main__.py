"""Runs random cases until there were enough batches or the time is over, and says what was met.

Prints a line for every case that fails, which runs it alone; exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.fuzz.case import SUBJECTS, Case
from tests.fuzz.space import Tally

# Of the time.
SHARES = {"neighbors": 6, "links": 4, "layers": 3, "features": 2, "aggregates": 1, "convolutions": 2, "snapshots": 2,
          "frames": 2, "partitions": 1, "stores": 3, "producers": 1, "replays": 2,
          "node_sets": 2, "small_graphs": 2}  # fmt: skip
# Cases of a subject after the end, for pairs that have not met.
MOST_LATE = 500


def run_cases(subjects: list[str], device: str, batches: int, seconds: float, seed: int,
              say: bool = True, most_failures: int = 50, at_most: float = float("inf")
              ) -> tuple[dict[str, Tally], list[str]]:  # fmt: skip
    """(what was met by subject, lines of failed cases); every pair meets once before the time counts.

    Args:
        subjects: What to run, in turns: the one that had the fewest seconds is next.
        device: Where.
        batches: Ends when so many were compared.
        seconds: Ends after so long, but for pairs that have not met.
        seed: Of the cases.
        say: Whether failures are printed.
        most_failures: Ends with so many.
        at_most: Ends after so many seconds, whatever has not met.
    """
    random, failures, start = Random(seed), [], time.monotonic()
    tallies = {name: Tally(SUBJECTS[name].space(device)) for name in subjects}
    late = dict.fromkeys(subjects, 0)
    rows = {name: tally.endless_rows(random) for name, tally in tallies.items()}
    while len(failures) < most_failures and time.monotonic() - start < at_most:
        is_over = sum(tally.batches for tally in tallies.values()) >= batches or time.monotonic() - start >= seconds
        names = [name for name in subjects if not is_over or (tallies[name].missing and late[name] < MOST_LATE)]
        if not names:
            break
        name = min(names, key=lambda name: tallies[name].seconds / SHARES[name])
        late[name] += is_over
        case, begin = Case(name, device, random.getrandbits(32), next(rows[name])), time.monotonic()
        try:
            num_batches = case.run()
        except Exception:
            failures.append(case.line())
            if say:
                traceback.print_exc()
                print(f"FAILED {case.line()}", flush=True)
        else:
            tallies[name].add(case.row, num_batches, time.monotonic() - begin)
    return tallies, failures


def show(tallies: dict[str, Tally]) -> str:
    """A table, a line for each subject and one for all."""
    rows = {name: tally.summarise() for name, tally in tallies.items()}
    names = list(next(iter(rows.values())))
    total = {name: sum(row[name] for row in rows.values()) for name in names}
    total["least often"] = min(row["least often"] for row in rows.values())
    total["seconds"] = round(total["seconds"], 1)
    lines = [f"| subject | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    lines += [f"| {name} | {' | '.join(f'{value:,}' for value in row.values())} |"
              for name, row in {**rows, "all": total}.items()]  # fmt: skip
    return "\n".join(lines)


def show_placements(tallies: dict[str, Tally]) -> str:
    """A table of the pairs in which each placement met."""
    lines = ["| subject | placement | pairs | pairs met | least often |", "| --- | --- | --- | --- | --- |"]
    for name, tally in tallies.items():
        for placement, (met, pairs, least) in tally.count_by("placement").items():
            lines.append(f"| {name} | {placement} | {pairs:,} | {met:,} | {least:,} |")
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--batches", type=int, default=10_000, help="batches to compare")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="time after which only pairs that have not met are sought"
    )
    parser.add_argument("--at-most", type=float, default=float("inf"), help="seconds after which no case is begun")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--subject", choices=sorted(SUBJECTS), action="append", help="one of them; all if not given")
    parser.add_argument("--case", help="run this case alone, as a failure prints it")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    if args.case:
        print(f"{Case.parse(args.case).run()} batches as expected")
        return 0
    torch.set_num_threads(1)
    start = time.monotonic()
    tallies, failures = run_cases(args.subject or list(SUBJECTS), args.device, args.batches, args.seconds, args.seed,
                                  at_most=args.at_most)  # fmt: skip
    wall = time.monotonic() - start
    batches = sum(tally.batches for tally in tallies.values())
    print(f"{show(tallies)}\n\n{show_placements(tallies)}")
    for name, tally in tallies.items():
        for pair in sorted(tally.missing)[:5]:
            print(f"did not meet in {name}: {' with '.join(map('='.join, pair))}")
    print(f"{batches:,} batches in {wall:.0f} s, {len(failures)} cases failed")
    if args.out:
        figures = {name: tally.summarise() for name, tally in tallies.items()}
        found: dict[str, Any] = {"device": args.device, "seed": args.seed, "wall_s": round(wall, 1), "batches": batches}
        places = {name: tally.count_by("placement") for name, tally in tallies.items()}
        found |= {"subjects": figures, "placements": places, "failures": failures}
        args.out.write_text(json.dumps(found, indent=1))
    return 1 if failures or any(tally.missing for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
