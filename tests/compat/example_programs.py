"""PyG's example programs, unedited, plain and by `run`, compared line by line.

`python -m tests.compat.example_programs PATH` runs each over generated data (`generated_data.py`), PATH being the
folder `examples` of a checkout of PyG, once plain and once by `pyg_direct run`, on one thread and with equal seeds, in
processes forked from one that has imported torch and PyG. It writes `tests/compat/example_programs_<machine>.md`, a row
as soon as a program is done, and ends with 1 if a result differs. A program's bytes are copied, never changed. Some
need scikit-learn, SciPy, RDKit, OGB or torch-sparse.

Programs take a GPU if there is one. Lines then differ by the order of additions and by other draws, so that scores are
compared over three seeds. A line's time is the median, as graphs are recorded in the first ones, and more lines are
read, for some seconds. `--part 2/6`, `--seconds 250` and `--missing` do a part of the programs at a time; the longest
begin first. Programs that need torch-sparse need a run of their own (`--only`) if it is built for CPUs: PyG takes it
for `ToSparseTensor` wherever it is installed, and it cannot multiply on a GPU then.
"""

import ast
import contextlib
import os
import random
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median, stdev
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer


def ask_in_fork(answer: Callable[[], str]) -> str:
    """Return an answer that another process gives, as no process that has started CUDA may fork."""
    source, target = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(target, answer().encode())
        finally:
            os._exit(0)
    os.close(target)
    with os.fdopen(source) as found:
        text = found.read()
    os.waitpid(process, 0)
    return text


if "torch_geometric" not in sys.modules:
    # PyG asks for it as it is imported, and the answer starts CUDA.
    torch.__config__.show = partial(str, ask_in_fork(torch.__config__.show))

from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE  # noqa: E402

import pyg_direct.cli.app  # noqa: E402
import pyg_direct.noedit.install  # noqa: E402
from pyg_direct.noedit.program_record import describe_program  # noqa: E402
from tests.compat.generated_data import generate  # noqa: E402

assert pyg_direct.cli.app
HERE = Path(__file__).parent
LOADERS = ("PyG", "pyg_direct")
SEEDS = (12, 13, 14)
# Standard errors between mean scores of programs whose batches are drawn.
ERRORS = 3.0
# On a GPU, times as many lines as on a CPU, if a program has them and writes them in so many seconds.
MORE_LINES = 5
MORE_SECONDS = 3.0
# Seconds to report what was left to PyG, after the last line.
LAST_SECONDS = 10.0
# Least speed-up that is not named at the end.
LEAST_SPEED_UP = 0.98


class Program(NamedTuple):
    """A program.

    Attributes:
        path: Its path below the folder of examples.
        lines: Number of its lines of scores to compare.
        begins: How these lines begin.
        is_drawn: True if its loaders draw their batches, so that lines differ. The last number of its last line is then
            compared over three seeds.
        options: Arguments of its command line.
        edits: Text that the second run replaces instead of `run`, as a guide says: its imports.
    """

    path: str
    lines: int = 3
    begins: str = "Epoch"
    is_drawn: bool = False
    options: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Its name in the table."""
        return " ".join([f"{self.path}, imports edited" if self.edits else self.path, *self.options])


def _list_all(lines: int, *paths: str) -> list[Program]:
    return [Program(f"{path}.py", lines) for path in paths]


PROGRAMS = [
    # Many small graphs, and events.
    Program("mutag_gin.py"),
    Program("proteins_topk_pool.py"),
    Program("proteins_diff_pool.py"),
    Program("proteins_mincut_pool.py"),
    Program("proteins_dmon_pool.py"),
    Program("proteins_gmt.py"),
    Program("mem_pool.py", 3, "Epoch 0"),
    Program("colors_topk_pool.py"),
    Program("pna.py"),
    Program("graph_gps.py"),
    Program("attentive_fp.py"),
    Program("egc.py"),
    Program("upfd.py"),
    Program("renet.py"),
    Program("seal_link_pred.py"),
    Program("ppi.py"),
    Program("film.py"),
    Program("geniepath.py"),
    Program("tgn.py", 3, "Test AP"),
    Program("tgn.py", 3, "Test AP", edits=(
        ("torch_geometric.loader import Temp", "pyg_direct import LastNeighborLoader, TGNMemory, Temp"),
        ("import TGNMemory, TransformerConv", "import TransformerConv"),
        ("    LastNeighborLoader,\n", ""))),
    # Of 35,100 graphs, each made by Python when a batch is requested.
    Program("triangles_sag_pool.py", 1),
    *_list_all(3, "gcn2_ppi", "jit/film"),
    Program("qm9_nn_conv.py", 1),
    # Whole graphs.
    *_list_all(20, "agnn", "argva_node_clustering", "arma", "autoencoder", "gat", "gcn", "gcn2_cora",
               "graph_unet", "infomax_transductive", "jit/gcn", "link_pred", "mixhop", "pmlp", "sgc",
               "super_gat", "tagcn", "linkx", "dir_gnn"),
    *_list_all(5, "dna", "ar_link_pred", "ogc", "sign", "unimp_arxiv"),
    Program("rect.py", 20, "Epoch"),
    Program("glnn.py", 5, "Epoch"),
    Program("correct_and_smooth.py", 20),
    Program("label_prop.py", 1, "Val"),
    Program("equilibrium_median.py"),
    Program("explain/gnn_explainer.py", 1, "Generated"),
    Program("explain/gnn_explainer_link_pred.py", 3),
    Program("explain/graphmask_explainer.py", 1, "Generated"),
    Program("signed_gcn.py", 20),
    # Graphs with types.
    *_list_all(20, "hetero/hgt_dblp", "hetero/hetero_conv_dblp", "hetero/han_imdb", "hetero/dmgi_unsup", "rgat",
               "rgcn"),
    Program("hetero/bipartite_sage.py", 10),
    Program("rgcn_link_pred.py", 10),
    Program("lightgcn.py", 3),
    Program("kge_fb15k_237.py", 10, options=("--model", "transe")),
    # Drawn batches.
    Program("reddit.py", 4, "Epoch:", is_drawn=True),
    Program("graph_sage_unsup.py", 10, is_drawn=True),
    Program("graph_sage_unsup_ppi.py", 3, "Train F1", is_drawn=True),
    Program("hetero/to_hetero_mag.py", 4, "Epoch:", is_drawn=True),
    Program("hetero/bipartite_sage_unsup.py", 3, "Epoch", is_drawn=True),
    Program("hetero/hetero_link_pred.py", 10),
    Program("hetero/metapath2vec.py", 1, "Epoch: 1, Accuracy", is_drawn=True),
    Program("infomax_inductive.py", 1, "Test", is_drawn=True),
    Program("graph_saint.py", 5, is_drawn=True),
    Program("shadow.py", 3, is_drawn=True),
]  # fmt: skip


class Run(NamedTuple):
    """Lines of scores of a run, seconds from the first to the last or for one line, and the classes that it left to
    PyG.
    """

    lines: list[str]
    seconds: float = float("nan")
    left: str = ""

    @property
    def score(self) -> float:
        """Last number of the last line."""
        return float(re.findall(r"\d+\.?\d*(?:e-?\d+)?", self.lines[-1])[-1])


def find_gpu() -> str:
    """Return the name of the GPU; empty without one."""
    return ask_in_fork(lambda: torch.cuda.get_device_name() if torch.cuda.is_available() else "")


def compare(program: Program, examples: Path, timeout: float, on_gpu: bool = False,
            end: float = float("inf")) -> dict[str, list[Run]]:  # fmt: skip
    """Run a program with both loaders in turn, each in a folder of its own with its own data; returns the runs.

    Args:
        program: The program.
        examples: Folder of the programs.
        timeout: Seconds until a run is ended.
        on_gpu: Run it with each seed, and read more lines. All runs are cut to the lines of the shortest.
        end: Time, by the monotonic clock, at which a run is ended.

    Raises:
        RuntimeError: a run ended before its last line.
    """
    runs: dict[str, list[Run]] = {loader: [] for loader in LOADERS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS if program.is_drawn or on_gpu else SEEDS[:1]:
            for loader in LOADERS:
                own = Path(folder) / loader / "examples"
                (own / program.path).parent.mkdir(parents=True, exist_ok=True)
                text = (examples / program.path).read_text()
                for old, new in program.edits if loader != "PyG" else ():
                    text = text.replace(old, new)
                (own / program.path).write_text(text)
                begin = ["run"] if loader != "PyG" and not program.edits else []
                left = min(timeout, end - time.monotonic())
                runs[loader].append(run([*begin, str(own / program.path)], program, left, seed, on_gpu=on_gpu))
    count = min(len(one.lines) for each in runs.values() for one in each)
    return {loader: [one._replace(lines=one.lines[:count]) for one in each] for loader, each in runs.items()}


def run(arguments: list[str], program: Program, timeout: float, seed: int = SEEDS[0], *, on_gpu: bool = False) -> Run:
    """Run a program in a process of its own, until its last line of scores.

    Args:
        arguments: The program's path, behind `run` if it runs by `pyg_direct run`.
        program: The program.
        timeout: Seconds until it is ended.
        seed: Of all generators, before it starts.
        on_gpu: Read more lines if there are any, and time one.

    Raises:
        RuntimeError: it ended before its last line.
    """
    source, target = os.pipe()
    errors = Path(arguments[-1]).with_suffix(".errors")
    errors.unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        # Its workers end with it.
        os.setsid()
        os.dup2(target, 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        _begin(arguments, program, seed)
    os.close(target)
    lines: list[str] = []
    times: list[float] = []
    with os.fdopen(source, errors="replace") as output:
        with _ended_after(timeout, process):
            for line in output:
                if not line.startswith(program.begins):
                    continue
                lines.append(line.strip())
                times.append(time.monotonic() if on_gpu else measure_time(process))
                if len(lines) >= program.lines and (not on_gpu or len(lines) == program.lines * MORE_LINES
                                                    or times[-1] > times[0] + MORE_SECONDS):  # fmt: skip
                    break
        # It reports what it left to PyG, and its workers may not outlive it.
        with _ended_after(LAST_SECONDS, process):
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)
    _end_workers(process)
    said = errors.read_text(errors="replace") if errors.exists() else ""
    if len(lines) < program.lines:
        raise RuntimeError(f"{arguments} ended after {lines}: {said[-1500:]}")
    left = re.findall(r"^pyg_direct: left to PyG: (.*)$", said, re.M)
    return Run(lines, find_seconds(times, on_gpu), left[-1] if left else "")


def find_seconds(times: list[float], on_gpu: bool) -> float:
    """Return the seconds from the first line to the last; on a GPU the median of those of a line."""
    if len(times) < 2:
        return float("nan")
    gaps = [later - sooner for sooner, later in pairwise(times)]
    return median(gaps[len(gaps) // 2 :]) if on_gpu else times[-1] - times[0]


def measure_time(process: int) -> float:
    """Return seconds of processor time of a process and its children."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # Its session; time of its own, and of its children that have ended.
        if int(fields[3]) == process:
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _ended_after(seconds: float, session: int) -> Iterator[None]:
    """End a program and its workers, which hold the pipe open that is read, if the block takes longer."""
    timer = threading.Timer(max(0.0, seconds), _end, [session])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _end(process: int) -> None:
    """End a program and its workers."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        # It has not begun its session.
        os.kill(process, signal.SIGKILL)


def _end_workers(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def _begin(arguments: list[str], program: Program, seed: int) -> None:
    """Run a program in this process, and end it."""
    # Also where a test has replaced them.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    here = os.getpid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    generate()
    torch.set_num_threads(1)
    # OGB reads its file as torch did before 2.6.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    for start in (random.seed, np.random.seed, torch.manual_seed):
        start(seed)  # type: ignore[operator]
    path = arguments[-1]
    os.chdir(Path(path).parent)
    sys.path[0] = str(Path(path).parent)
    try:
        if arguments[0] == "run":
            sys.argv = ["pyg_direct", *arguments, *program.options]
            runpy.run_module("pyg_direct", run_name="__main__", alter_sys=True)
        else:
            sys.argv = [path, *program.options]
            runpy.run_path(path, run_name="__main__")
    except SystemExit:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        if arguments[0] == "run" and os.getpid() == here:
            # What it would say at its end.
            for line in describe_program():
                print("pyg_direct:", line, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


HEADER = ["| program | lines | equal | last line, plain | last line, by `run` | seconds, plain | by `run` "
          "| left to PyG | commit |",
          "| --- | ---: | ---: | --- | --- | ---: | ---: | --- | --- |"]  # fmt: skip


def tabulate(results: dict[str, dict[str, list[Run]]], before: str = "", commit: str = "unknown") -> str:
    """Lines of scores by program: how many are equal, and the last one, in Markdown.

    Args:
        results: Runs by program and loader; with several seeds the mean scores stand for the lines.
        before: An earlier table, whose rows of other programs stay.
        commit: What the runs were made at.
    """
    rows = [row for row in before.splitlines() if row.startswith("| ") and row not in HEADER
            and row.split(" | ")[0].removeprefix("| ") not in results]  # fmt: skip
    for name, runs in results.items():
        plain, ours = runs.values()
        if len(plain) > 1:
            shown = [f"{score:.4g} ± {error:.2g}" for score, error in (measure_scores(plain), measure_scores(ours))]
            equal = "-"
        else:
            pairs = list(zip(plain[0].lines, ours[0].lines, strict=False))
            equal = str(sum(first == second for first, second in pairs))
            same = "the same" if ours[0].lines[-1] == plain[0].lines[-1] else ours[0].lines[-1]
            shown = [plain[0].lines[-1], same]
        seconds = [_show_seconds(mean(one.seconds for one in each)) for each in (plain, ours)]
        rows.append(f"| {' | '.join([name, str(len(plain[0].lines)), equal, *shown, *seconds, ours[0].left])} "
                    f"| {commit} |")  # fmt: skip
    return "\n".join([*HEADER, *rows]) + "\n"


def _show_seconds(seconds: float) -> str:
    return "-" if seconds != seconds else f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.2g}"


def measure_scores(runs: list[Run]) -> tuple[float, float]:
    """Return the mean score of runs and its standard error."""
    scores = [one.score for one in runs]
    return mean(scores), stdev(scores) / len(scores) ** 0.5


def is_apart(runs: dict[str, list[Run]]) -> bool:
    """Check that lines differ, or mean scores of drawn batches by more than three standard errors."""
    plain, ours = runs.values()
    if len(plain) == 1:
        return plain[0].lines != ours[0].lines
    (first, error), (second, other) = measure_scores(plain), measure_scores(ours)
    return abs(first - second) > ERRORS * (error**2 + other**2) ** 0.5


def is_slow(runs: dict[str, list[Run]]) -> bool:
    """Check that runs by ours take longer than plain ones."""
    plain, ours = (mean(one.seconds for one in each) for each in runs.values())
    return plain < LEAST_SPEED_UP * ours


def choose(only: str = "", part: str = "1/1", before: str | None = None) -> list[Program]:
    """List the programs to run.

    Args:
        only: Parts of their names, by commas.
        part: `K/N` takes the Kth of N parts, in which long and short programs are mixed.
        before: A table; programs with a row are left out.

    Raises:
        ValueError: `part` is no such fraction.
    """
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"part must be K/N with 1 <= K <= N, got {part!r}")
    done = {row.split(" | ")[0].removeprefix("| ") for row in (before or "").splitlines()}
    wanted = [one for one in PROGRAMS if any(word in one.name for word in only.split(","))]
    return [one for one in wanted[int(number) - 1 :: int(count)] if one.name not in done]


def find_missing(program: Program, examples: Path) -> str | None:
    """Return a package that a program needs and that is not installed; None without one."""
    if program.is_drawn and not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        return "pyg-lib or torch-sparse"
    names: list[str] = []
    for part in ast.walk(ast.parse((examples / program.path).read_text())):
        if isinstance(part, ast.Import):
            names += [name.name for name in part.names]
        elif isinstance(part, ast.ImportFrom) and not part.level:
            names.append(str(part.module))
    return next((name for name in (name.split(".")[0] for name in names) if find_spec(name) is None), None)


def order(programs: list[Program], table: str) -> list[Program]:
    """Return programs, the longest first by the seconds of a table; first of all those without any."""
    rows = [row.removeprefix("| ").split(" | ") for row in table.splitlines() if row not in HEADER]
    seconds = {row[0]: float(row[5]) for row in rows if len(row) > 6 and row[5] != "-"}
    return sorted(programs, key=lambda one: -seconds.get(one.name, float("inf")))


def compare_all(programs: list[Program], examples: Path, timeout: int, *, on_gpu: bool, jobs: int = 1,
                seconds: float = float("inf")) -> Iterator[tuple[Program, dict[str, list[Run]] | None]]:  # fmt: skip
    """Compare programs, `jobs` at a time; returns each with its runs as soon as it is done, or None if one failed.

    Args:
        programs: The programs.
        examples: Folder of the programs.
        timeout: Seconds until a run is ended.
        on_gpu: Run each program with each seed, and read more lines.
        jobs: Programs at a time.
        seconds: All ends after so many. Programs that are not done then are left out.
    """
    each = partial(_compare_until, examples=examples, timeout=timeout, on_gpu=on_gpu, end=time.monotonic() + seconds)
    if jobs == 1:
        found: Iterator[tuple[Program, dict[str, list[Run]] | None]] = ((one, each(one)) for one in programs)
        yield from (pair for pair in found if pair[1] != {})
        return
    # Not a pool of daemons, whose programs may start no processes.
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        futures = {pool.submit(each, program): program for program in programs}
        for future in as_completed(futures):
            program, runs = futures[future], future.result()
            if runs != {}:
                yield program, runs


def _compare_until(program: Program, examples: Path, timeout: int, on_gpu: bool, end: float
                   ) -> dict[str, list[Run]] | None:  # fmt: skip
    """Compare a program; returns None if a run failed, and nothing if time ended."""
    try:
        return compare(program, examples, timeout, on_gpu, end) if time.monotonic() < end else {}
    except RuntimeError as error:
        if time.monotonic() >= end:
            return {}
        print(error, flush=True)
        return None


def main(
    examples: Annotated[Path, typer.Argument(help="The folder `examples` of a checkout of PyG.")],
    only: Annotated[str, typer.Option(help="Parts of the names of the programs to run, by commas.")] = "",
    part: Annotated[str, typer.Option(help="K/N: the Kth of N parts of the programs.")] = "1/1",
    missing: Annotated[bool, typer.Option(help="Only programs without a row.")] = False,
    jobs: Annotated[int, typer.Option(help="Programs at a time; seconds are then those of a shared machine.")] = 1,
    timeout: Annotated[int, typer.Option(help="Seconds for each run.")] = 600,
    seconds: Annotated[float, typer.Option(help="All ends after so many.")] = float("inf"),
    out: Annotated[Path, typer.Option(help="Folder of the table.")] = HERE,
) -> None:
    """Run PyG's example programs with PyG's loaders and with ours."""
    import torch_geometric

    from pyg_direct.bench.result_row import read_commit

    gpu = find_gpu()
    path = out / f"example_programs_{gpu.split()[-1].lower() if gpu else 'cpu'}.md"
    compared = (
        "the last\nnumber of the last line is compared, its mean over three seeds and the standard error. Seconds are "
        "the median\n"
        f"of those of a line, {jobs} programs at a time.\n\n" if gpu else
        "lines are compared. If batches are drawn,\nthe last number of the last line is compared, its mean over three "
        "seeds and the standard error.\nSeconds go from the first line to the last, of processor time.\n\n"
    )  # fmt: skip
    head = (
        "# PyG's example programs, line by line\n\nPyG "
        f"{torch_geometric.__version__}, torch {torch.__version__}, {gpu or 'CPU'}, one thread; `python -m "
        "tests.compat.example_programs PATH`.\nData sets are generated, in the place of what their classes "
        "download. Each program runs plain\nand by `pyg_direct run`, with equal seeds, and ends after a few lines "
        f"of scores; {compared}"
    )
    apart, failed, slow = [], [], []
    chosen = choose(only, part, path.read_text() if missing and path.exists() else None)
    needs = {one: find_missing(one, examples) for one in chosen}
    for one, package in needs.items():
        if package is not None:
            print(f"{one.name} needs {package}", flush=True)
    programs = order([one for one in chosen if needs[one] is None], (HERE / "example_programs_cpu.md").read_text())
    for program, runs in compare_all(programs, examples, timeout, on_gpu=bool(gpu), jobs=jobs, seconds=seconds):
        if runs is None:
            failed.append(program.name)
            continue
        table = tabulate({program.name: runs}, path.read_text() if path.exists() else "", read_commit())
        path.write_text(head + table)
        print(table.splitlines()[-1], flush=True)
        if is_apart(runs):
            apart.append(program.name)
        if is_slow(runs):
            slow.append(program.name)
    print(f"apart: {apart}, failed: {failed}, slower than {LEAST_SPEED_UP} x: {slow}")
    raise typer.Exit(int(bool(apart or failed)))


if __name__ == "__main__":
    typer.run(main)
