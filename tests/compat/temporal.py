"""PyTorch Geometric Temporal's own tests, run with our layers and streams in the place of its own, and counted.

`python -m tests.compat.temporal PATH` runs them, PATH being the folder `test` of a checkout at the tag of the installed
release, says what is not expected, and writes the counts to `tests/compat/counts_temporal.md`.
"""

import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from pyg_direct.bench.result_row import read_commit
from tests.compat.suite import HERE, find_unexpected, run, tabulate

COUNTS = HERE / "counts_temporal.md"
# Files, and the part of their tests that needs no download.
FILES = {
    "recurrent_test.py": "",
    "batch_test.py": "",
    "heterogeneous_test.py": "",
    "dataset_test.py": "not (chickenpox or covid or metr or montevideo or mtm or pedal or pems or twitter or wiki "
                       "or windmill or discrete_train_test_split_static)",
}  # fmt: skip


def main(tests: Path) -> int:
    """Run, write the counts, say what was not expected."""
    results = run(tests, FILES, plugin="tests.compat.temporal_plugin")
    head = ("# PyTorch Geometric Temporal's own tests with our layers and streams in the place of its own\n\n"
            f"PyTorch Geometric Temporal {version('torch-geometric-temporal')}, torch {version('torch')}, CPU, commit "
            f"{read_commit()}; `python -m tests.compat.temporal PATH`.\n\n")  # fmt: skip
    COUNTS.write_text(head + tabulate(results))
    unexpected, _ = find_unexpected(results, "")
    print(Counter(result.outcome for result in results))
    for result in unexpected:
        print("not expected:", *result)
    return int(bool(unexpected))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
