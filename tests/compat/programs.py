"""PyG's own example programs, unedited, with PyG's loaders and with ours: what they reach, and how long epochs take.

`python -m tests.compat.programs PATH` runs them over three seeds, PATH being the folder `examples` of a checkout of
PyG, each once as `python program.py` and once as `python -m pyg_direct run program.py`, and writes
`tests/compat/programs_<machine>.md`; with `--scale 0.01 --epochs 12` it takes minutes on a CPU. Data sets are generated
(`datasets.py`), where the program looks for them. A program's bytes are copied, never changed. PyG's loaders need
pyg-lib or torch_sparse.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import Annotated, NamedTuple

import typer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Loaded by every Python that is started with it on its path: programs set no seed.
SEEDING = "import os, torch\ntorch.manual_seed(int(os.environ['COMPAT_SEED']))\n"
LOADERS = {"PyG": [], "pyg_direct": ["-m", "pyg_direct", "run"]}
POINTS = 1.0


class Program(NamedTuple):
    """A program.

    Attributes:
        path: Its path below the folder of examples.
        dataset: Name of its data set in `datasets.py`.
        root: Where it looks for it, from its own folder.
        scale: Factor on the size of the generated graph.
        score: Pattern of the last score that it prints.
        begins: How lines of scores begin.
        trained: How a line begins that tells that an epoch's training is over, where scores take long after it; else
            an epoch lasts from one line of scores to the next.
    """

    path: str
    dataset: str
    root: str
    scale: float
    score: str
    begins: str = "Epoch:"
    trained: str = ""


PROGRAMS = [
    Program("reddit.py", "reddit", "../data/Reddit", 1.0, r"Test: ([\d.]+)"),
    Program("hetero/to_hetero_mag.py", "mag", "../../data/OGB", 1.0, r"Val: ([\d.]+)"),
    Program("graph_sage_unsup.py", "cora", "../data/Cora", 1.0, r"Test: ([\d.]+)"),
    Program("shadow.py", "flickr", "../data/Flickr", 0.1, r"Val: ([\d.]+)"),
    Program("graph_sage_unsup_ppi.py", "ppi", "../data/PPI", 1.0, r"Test F1: ([\d.]+)", "Train F1:", "Epoch:"),
]


class Run(NamedTuple):
    """What a run printed: the score of each epoch, and the seconds between their lines."""

    scores: list[float]
    seconds: list[float]

    @property
    def reached(self) -> float:
        """Percent, the mean of the last fifth of the epochs: scores of single epochs differ by more than a point."""
        return 100 * mean(self.scores[-max(1, len(self.scores) // 5) :])


def run(program: Program, folder: Path, loader: str, seed: int, epochs: int | None, timeout: float) -> Run:
    """Run a program in a process of its own.

    Args:
        program: Which.
        folder: The folder of examples, with the data set where the program looks for it.
        loader: `PyG` or `pyg_direct`.
        seed: Of torch, before the program starts.
        epochs: End it after so many; None lets it finish.
        timeout: Seconds until it is ended all the same.

    Raises:
        RuntimeError: it failed, or printed no score.
    """
    with tempfile.TemporaryDirectory() as seeding:
        (Path(seeding) / "sitecustomize.py").write_text(SEEDING)
        path = os.pathsep.join([seeding, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-u", "-W", "ignore", *LOADERS[loader], str(folder / program.path)]
        errors = Path(seeding) / "errors"
        with errors.open("w") as file:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True,
                                       env={**os.environ, "PYTHONPATH": path, "COMPAT_SEED": str(seed)})  # fmt: skip
        scores, marks, trained = [], [], []
        begin = time.monotonic()
        is_ended = False
        assert process.stdout is not None
        for line in process.stdout:
            if program.trained and line.startswith(program.trained) and marks:
                trained.append(time.monotonic() - marks[-1])
            found = re.search(program.score, line) if line.startswith(program.begins) else None
            if found:
                scores.append(float(found[1]))
                marks.append(time.monotonic())
            if (epochs is not None and len(scores) >= epochs) or time.monotonic() - begin > timeout:
                is_ended = True
                process.terminate()
                break
        process.stdout.close()
        code = process.wait()
        if not scores or (code != 0 and not is_ended):
            raise RuntimeError(f"{program.path} with {loader} ended with {code}: {errors.read_text()[-1500:]}")
    return Run(scores, trained if program.trained else [after - before for before, after in pairwise(marks)])


HEADER = ["| program | loader | graph | score of each seed, % | mean | standard error | seconds an epoch, median "
          "| commit |",
          "| --- | --- | --- | --- | ---: | ---: | ---: | --- |"]  # fmt: skip
BEGINNINGS = ("| program | loader | ", "| --- | --- | ")


def tabulate(results: dict[str, dict[str, list[Run]]], graphs: dict[str, str], before: str = "",
             commit: str = "unknown") -> str:  # fmt: skip
    """Scores and seconds by program and loader, in Markdown.

    Args:
        results: Runs by program and loader.
        graphs: The graph of each program.
        before: An earlier table, whose rows of other programs stay.
        commit: What the runs were made at. Kept rows that name none are left without.
    """
    kept = [line for line in before.splitlines() if line.startswith("| ") and not line.startswith(BEGINNINGS)]
    lines = [line if line.count(" | ") == HEADER[0].count(" | ") else f"{line} - |"
             for line in kept if line.split(" | ")[0].removeprefix("| ") not in results]  # fmt: skip
    for name, by_loader in results.items():
        for loader, runs in by_loader.items():
            scores = [one.reached for one in runs]
            error = stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else float("nan")
            seconds = [value for one in runs for value in one.seconds]
            middle = median(seconds) if seconds else float("nan")
            lines.append(f"| {name} | {loader} | {graphs[name]} | {', '.join(f'{score:.1f}' for score in scores)} "
                         f"| {mean(scores):.2f} | {error:.2f} | {middle:.3f} | {commit} |")  # fmt: skip
    return "\n".join([*HEADER, *lines]) + "\n"


def find_apart(results: dict[str, dict[str, list[Run]]]) -> list[str]:
    """Programs whose mean scores with both loaders differ by more than a point."""
    apart = []
    for name, by_loader in results.items():
        means = [mean(one.reached for one in runs) for runs in by_loader.values()]
        if max(means) - min(means) > POINTS:
            apart.append(f"{name}: {means}")
    return apart


def main(
    examples: Annotated[Path, typer.Argument(help="The folder `examples` of a checkout of PyG.")],
    seeds: Annotated[int, typer.Option(help="Runs of each program with each loader.")] = 3,
    scale: Annotated[float, typer.Option(help="Further factor on the size of all graphs but Cora.")] = 1.0,
    epochs: Annotated[int | None, typer.Option(help="End programs after so many epochs.")] = None,
    only: Annotated[str, typer.Option(help="Part of the names of the programs to run.")] = "",
    loaders: Annotated[str, typer.Option(help="Which loaders, by commas.")] = ",".join(LOADERS),
    timeout: Annotated[float, typer.Option(help="Seconds for each run.")] = 3600,
    work: Annotated[Path | None, typer.Option(help="Folder for programs and data sets, to be kept.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the table.")] = HERE,
) -> None:
    """Run PyG's example programs with PyG's loaders and with ours."""
    import torch
    import torch_geometric

    from pyg_direct.bench.result_row import read_commit
    from tests.compat import datasets

    results: dict[str, dict[str, list[Run]]] = {}
    graphs = {}
    with tempfile.TemporaryDirectory() as root:
        folder = (Path(root) if work is None else work.resolve()) / "examples"
        for program in PROGRAMS:
            if only not in program.path:
                continue
            (folder / program.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(examples / program.path, folder / program.path)
            factor = program.scale * (1.0 if program.dataset == "cora" else scale)
            if not (folder / Path(program.path).parent / program.root).exists():
                datasets.write(program.dataset, (folder / Path(program.path).parent / program.root).resolve(), factor)
            graphs[program.path] = f"{program.dataset} x {factor:g}"
            results[program.path] = {loader: [] for loader in loaders.split(",")}
            # In turn, so that a drift of the machine meets both.
            for seed in range(seeds):
                for loader, runs in results[program.path].items():
                    runs.append(run(program, folder, loader, seed, epochs, timeout))
                    print(program.path, loader, seed, f"{runs[-1].reached:.2f} %, {sum(runs[-1].seconds):.1f} s",
                          flush=True)  # fmt: skip
    if seeds == 0:
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    name = "cpu" if device == "CPU" else device.split()[-1].lower()
    sampler = "pyg-lib" if torch_geometric.typing.WITH_PYG_LIB else "torch-sparse"
    head = (
        f"# PyG's example programs with PyG's loaders and with ours\n\nPyG {torch_geometric.__version__} (its loaders "
        f"with {sampler}), torch {torch.__version__}, {device}, {os.cpu_count()} cores; `python -m "
        "tests.compat.programs PATH`.\nGraphs are generated, those of Planetoid, PPI, Reddit and OGB_MAG in the place "
        "of what these classes download. Epochs include what a program does between two lines of "
        "its scores.\n\n"
    )
    path = out / f"programs_{name}.md"
    earlier = path.read_text() if path.exists() else ""
    path.write_text(head + tabulate(results, graphs, earlier, read_commit()))
    apart = find_apart(results)
    for line in apart:
        print("more than a point apart:", line)
    raise typer.Exit(int(bool(apart)))


if __name__ == "__main__":
    typer.run(main)
