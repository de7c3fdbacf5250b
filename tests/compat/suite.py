"""PyG's own tests of loaders and samplers, run with ours in their place and counted.

`python -m tests.compat.suite PATH` runs them, PATH being the folder `test` of a checkout of PyG at the tag of the
installed release, says what is not expected, and writes the counts to `tests/compat/counts.md`, on a GPU to
`tests/compat/counts_<machine>.md`.

`python -m tests.compat.suite` without a path runs our own tests of the same contracts (`OWN`), written from PyG's
documentation, and prints their counts; a failure, and a skip that `tests/allowed_skips.txt` does not list, ends it
with 1.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXPECTED = HERE / "expected.txt"
ALLOWED_SKIPS = HERE.parent / "allowed_skips.txt"

# Files, and the part of their tests that loaders concern (as pytest's -k has it).
FILES = {
    "loader/test_neighbor_loader.py": "",
    "loader/test_link_neighbor_loader.py": "",
    "loader/test_neighbor_sampler.py": "",
    "loader/test_dataloader.py": "",
    "loader/test_dynamic_batch_sampler.py": "",
    "loader/test_zip_loader.py": "",
    "loader/test_imbalanced_sampler.py": "",
    "loader/test_mixin.py": "",
    "loader/test_cache.py": "",
    "loader/test_prefetch.py": "",
    "loader/test_utils.py": "",
    "loader/test_hgt_loader.py": "",
    "loader/test_shadow.py": "",
    "loader/test_cluster.py": "",
    "loader/test_graph_saint.py": "",
    "loader/test_random_node_loader.py": "",
    "loader/test_temporal_dataloader.py": "",
    "nn/models/test_tgn.py": "",
    "nn/models/test_re_net.py": "",
    "nn/models/test_node2vec.py": "",
    "nn/models/test_metapath2vec.py": "",
    "sampler/test_sampler_base.py": "",
    "sampler/test_sampler_neighbor_sampler.py": "",
    "utils/test_trim_to_layer.py": "",
    "nn/models/test_basic_gnn.py": "inference or trim or loader or degree",
    "nn/conv/test_pna_conv.py": "inference or trim or loader or degree",
    "transforms/test_rooted_subgraph.py": "",
    "data/lightning/test_datamodule.py": "",
    "data/test_hypergraph_data.py": "",
}

# Our own tests of what loaders and samplers promise, below `tests`.
OWN = (
    "loader/neighbor_loader/test_neighbor.py",
    "loader/batch_sampler/test_batches.py",
    "loader/arguments/test_arguments.py",
    "loader/arguments/test_options.py",
    "loader/collate/data/test_pyg.py",
    "loader/collate/data/test_adjacency.py",
    "sampler/test_neighbor_sampler.py",
    "loader/neighbor_loader/test_temporal.py",
    "loader/collate/test_hetero_data.py",
    "loader/arguments/test_hetero.py",
    "sampler/test_link_seeds.py",
    "loader/link_loader/test_link_forms.py",
    "loader/collate/data/test_stores.py",
    "loader/test_legacy_neighbor_loader.py",
    "loader/data_loader/test_batches.py",
    "loader/data_loader/test_epochs.py",
    "loader/data_loader/test_other_data_sets.py",
    "loader/data_loader/test_dense_data_loader.py",
    "loader/data_loader/test_data_list_loader.py",
    "loader/prefetch_loader/test_prefetch_loader.py",
    "loader/prefetch_loader/test_cached_loader.py",
    "loader/test_hgt_loader.py",
    "loader/induced_loader/test_shadow_loader.py",
    "loader/neighbor_loader/test_subgraph_loader.py",
    "loader/cluster_loader/test_random_node_loader.py",
    "loader/cluster_loader/test_cluster_loader.py",
    "loader/test_graph_saint.py",
    "loader/test_walk_models.py",
    "loader/test_inference.py",
    "sampling/hetero_plan/test_general.py",
    "sampling/uniform_plan/test_distribution.py",
    "sampling/hetero_plan/test_weighted.py",
    "sampling/test_hgt_sampling.py",
    "sampling/negative_links/test_negative.py",
    "nn/test_trimming.py",
    "noedit/install/test_install.py",
    "noedit/install/test_lightning.py",
)


class Result(NamedTuple):
    """What came of a test."""

    test: str
    outcome: str
    reason: str

    @property
    def file(self) -> str:
        """Its file, below the folder of tests."""
        return re.sub(r"^tests?/", "", self.test.partition("::")[0])


def run(tests: Path, files: dict[str, str] = FILES, timeout: float = 1500,
        plugin: str = "tests.compat.plugin", importing: str = "prepend") -> list[Result]:  # fmt: skip
    """Run tests in processes of their own, one for each choice of tests, imported in pytest's way of that name.

    Raises:
        FileNotFoundError: `tests` is not a folder with these tests.
    """
    first = next(iter(files))
    if not (tests / first).exists():
        raise FileNotFoundError(f"{tests} must be the folder `test` of a checkout, with `{first}` in it")
    results = []
    for choice in sorted(set(files.values())):
        chosen = [str(tests / file) for file, part in files.items() if part == choice and (tests / file).exists()]
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "results.jsonl"
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            # Not that of a folder above, where the tests lie inside another project.
            own = tests.parent / "pyproject.toml"
            command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", plugin, "-p", "no:cacheprovider",
                       "-c", str(own if own.exists() else os.devnull), "-o", "addopts=", f"--import-mode={importing}",
                       "--rootdir", str(tests.parent), *chosen]  # fmt: skip
            # FULL_TEST: PyG leaves out what takes long without it.
            environment = {**os.environ, "FULL_TEST": "1", "PYTHONPATH": path, "COMPAT_RESULTS": str(written)}
            # Options for other runs: each process of `-n 2` would write down what came of its tests, once more.
            environment.pop("PYTEST_ADDOPTS", None)
            done = subprocess.run(command + (["-k", choice] if choice else []), cwd=tests.parent, timeout=timeout,
                                  env=environment, capture_output=True, text=True)  # fmt: skip
            if not written.exists():
                raise RuntimeError(f"the tests did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
            results += [Result(*json.loads(line)) for line in written.read_text().splitlines()]
    return results


def find_unexpected(results: list[Result], expected: str, *, given: tuple[str, ...] = ()
                    ) -> tuple[list[Result], list[str]]:  # fmt: skip
    """Failures and skips that no line of `expected` names, and lines that name none.

    A line is `outcome | test (glob) | why`; one that begins with `[what]` counts only where that is `given`.
    """
    lines = []
    for line in expected.splitlines():
        condition, _, rest = line.removeprefix("[").partition("] ") if line.startswith("[") else ("", "", line)
        if rest and not rest.startswith("#") and (not condition or condition in given):
            lines.append(rest)
    rules = [[part.strip() for part in line.split("|", 2)] for line in lines]
    used, unexpected = set(), []
    for result in results:
        if result.outcome == "passed":
            continue
        fitting = [i for i, (outcome, test, _) in enumerate(rules)
                   if outcome == result.outcome and fnmatch(result.test, test)]  # fmt: skip
        used |= set(fitting)
        if not fitting:
            unexpected.append(result)
    return unexpected, [line for i, line in enumerate(lines) if i not in used]


def describe_machine() -> tuple[str, ...]:
    """What lines of `expected.txt` may ask for, as far as it is so here."""
    import torch

    found = ["GPU" if torch.cuda.is_available() else "no GPU"]
    if find_spec("pyg_lib") is None:
        found.append("no pyg-lib")
    return tuple(found)


def tabulate(results: list[Result]) -> str:
    """Counts by file, and each failure and skip with its reason, in Markdown."""
    counts = {}
    for result in results:
        counts.setdefault(result.file, Counter())[result.outcome] += 1
    rows = [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]
    lines = ["| file | passed | failed | skipped |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {file} | {count['passed']} | {count['failed']} | {count['skipped']} |" for file, count in rows]
    others = Counter((r.outcome, re.sub(r"^tests?/|\[.*", "", r.test), r.reason) for r in results
                     if r.outcome != "passed")  # fmt: skip
    lines += ["", "| outcome | test | cases | reason |", "| --- | --- | ---: | --- |"]
    for (outcome, test, reason), number in sorted(others.items()):
        shown = reason.replace("|", "\\|")[:160]
        lines.append(f"| {outcome} | {test} | {number} | {shown} |")
    return "\n".join(lines) + "\n"


def main_own(files: Sequence[str] = OWN) -> int:
    """Run our own tests, print their counts; 1 where one fails or is skipped for a reason that is not listed."""
    results = run(ROOT / "tests", dict.fromkeys(files, ""), timeout=3600, plugin="tests.compat.report",
                  importing="importlib")  # fmt: skip
    print(tabulate(results))
    lines = [line for line in ALLOWED_SKIPS.read_text().splitlines() if line and not line.startswith("#")]
    listed = [[part.strip() for part in line.split("|", 1)] for line in lines]
    unexpected = [result for result in results if result.outcome == "failed" or (
        result.outcome == "skipped"
        and not any(fnmatch(result.test, test) and result.reason == why for test, why in listed))]  # fmt: skip
    print(Counter(result.outcome for result in results))
    for result in unexpected:
        print("not expected:", *result)
    return int(bool(unexpected))


def main(tests: Path) -> int:
    """Run PyG's own tests with our loaders and samplers, write the counts, say what was not expected."""
    import torch
    import torch_geometric

    from pyg_direct.bench.result_row import read_commit

    results = run(tests)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    counts = HERE / ("counts.md" if device == "CPU" else f"counts_{device.split()[-1].lower()}.md")
    head = (f"# PyG's own tests with our loaders in the place of PyG's\n\nPyG {torch_geometric.__version__}, torch "
            f"{torch.__version__}, {device}, commit {read_commit()}; `python -m tests.compat.suite PATH`.\n"
            "Cora is generated in the place of what Planetoid downloads.\n\n")  # fmt: skip
    counts.write_text(head + tabulate(results))
    unexpected, unused = find_unexpected(results, EXPECTED.read_text(), given=describe_machine())
    print(Counter(result.outcome for result in results))
    for result in unexpected:
        print("not expected:", *result)
    for line in unused:
        print("expected in vain:", line)
    return int(bool(unexpected or unused))


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tests.compat.suite", description=main.__doc__)
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        help="the folder `test` of a checkout of PyG; without it our own tests of the same contracts run",
    )
    path = parser.parse_args().path
    sys.exit(main_own() if path is None else main(path.resolve()))
