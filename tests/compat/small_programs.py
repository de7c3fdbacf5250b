"""PyG's example programs over many small graphs and over events, unedited, plain and by `run`, compared line by line.

`python -m tests.compat.small_programs PATH` runs each over generated data, PATH being the folder `examples` of a
checkout of PyG, once plain and once by `pyg_direct run`, on one thread and with equal seeds, in processes forked from
one that has imported torch and PyG. It writes `tests/compat/small_programs_<machine>.md`, and ends with 1 if a line
differs. A program's bytes are copied, never changed. Some need scikit-learn, SciPy, RDKit, OGB or torch-sparse.
"""

import os
import random
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor
from torch_geometric import datasets
from torch_geometric.data import Data, TemporalData

import pyg_direct.cli.app
import pyg_direct.noedit.install
from tests.compat.datasets import make_cora, make_ppi

assert pyg_direct.cli.app
HERE = Path(__file__).parent
SEED = 12
LOADERS = ("PyG", "pyg_direct")


class Small(NamedTuple):
    """A program.

    Attributes:
        path: Its path below the folder of examples.
        begins: How its lines of scores begin.
        lines: Number of such lines to compare.
        edits: Text that the second run replaces instead of `run`, as a guide says: its imports.
    """

    path: str
    begins: str = "Epoch"
    lines: int = 3
    edits: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Its name in the table."""
        return f"{self.path}, imports edited" if self.edits else self.path


PROGRAMS = [
    Small("mutag_gin.py"),
    Small("proteins_topk_pool.py"),
    Small("proteins_diff_pool.py"),
    Small("proteins_mincut_pool.py"),
    Small("proteins_dmon_pool.py"),
    Small("proteins_gmt.py"),
    Small("mem_pool.py", "Epoch 0"),
    Small("colors_topk_pool.py"),
    Small("pna.py"),
    Small("graph_gps.py"),
    Small("attentive_fp.py"),
    Small("egc.py"),
    Small("upfd.py"),
    Small("renet.py"),
    Small("seal_link_pred.py"),
    Small("ppi.py"),
    Small("film.py"),
    Small("geniepath.py"),
    Small("tgn.py", "Test AP"),
    Small("tgn.py", "Test AP", edits=(
        ("torch_geometric.loader import Temp", "pyg_direct import LastNeighborLoader, TGNMemory, Temp"),
        ("import TGNMemory, TransformerConv", "import TransformerConv"),
        ("    LastNeighborLoader,\n", ""))),
    # Of 35,100 graphs, each made by Python when a batch is requested.
    Small("triangles_sag_pool.py", lines=1),
]  # fmt: skip


class Shape(NamedTuple):
    """A generated graph.

    Attributes:
        label: Its class, which its nodes and edges show: 0 or 1.
        kinds: Kinds of its nodes, int64 `[N]` in [0, 3).
        edge_index: A tree and some more edges, both ways, without a second one of any, int64 `[2, E]`.
    """

    label: int
    kinds: Tensor
    edge_index: Tensor


def draw(count: int, low: int, high: int) -> list[Shape]:
    """Draw graphs of `low` to `high` nodes; equal arguments give equal graphs."""
    random = torch.Generator().manual_seed(count)

    def draw_one() -> Shape:
        label, num_nodes = int(torch.randint(2, (), generator=random)), int(
            torch.randint(low, high + 1, (), generator=random))  # fmt: skip
        kinds = torch.randint(3 - label, (num_nodes,), generator=random)
        target = torch.arange(1, num_nodes)
        source = (torch.rand(num_nodes - 1, generator=random) * target).long()
        more = torch.randint(num_nodes, (2, num_nodes // (4 - 2 * label)), generator=random)
        pairs = torch.cat([torch.stack([source, target]), more[:, more[0] != more[1]]], 1)
        return Shape(label, kinds, torch.cat([pairs, pairs.flip(0)], 1).unique(dim=1))

    return [draw_one() for _ in range(count)]


def one_hot(numbers: Tensor, size: int) -> Tensor:
    """Return rows of zeros with a one at the place of each number, float32 `[N, size]`."""
    return torch.nn.functional.one_hot(numbers, size).float()


def make_rows(shape: Shape, width: int) -> Tensor:
    """Make features that follow from the kinds of nodes, float32 `[N, width]`."""
    return (shape.kinds[:, None] * torch.arange(1, width + 1)).float().sin()


def make_bonds(shape: Shape, count: int) -> Tensor:
    """Make kinds of edges, equal both ways, int64 `[E]`."""
    return shape.kinds[shape.edge_index].sum(0) % count


# Graphs in the collection of TU, and numeric attributes of their nodes; others have kinds of nodes.
_TU = {"MUTAG": (188, 10, 25, 0), "PROTEINS": (300, 10, 40, 0), "PROTEINS_full": (300, 10, 40, 29),
       "TRIANGLES": (35_100, 4, 6, 1), "COLORS-3": (3_200, 4, 20, 5)}  # fmt: skip


def make_tu(dataset: Any) -> list[list[Data]]:
    """Make the graphs of a `TUDataset`, which has its number of attributes beside them."""
    count, low, high, width = _TU[dataset.name]
    with_labels = dataset.name.startswith(("MUTAG", "PROTEINS"))
    dataset.sizes = {"num_node_labels": 3 * with_labels, "num_node_attributes": width, "num_edge_labels": 0,
                     "num_edge_attributes": 0}  # fmt: skip
    return [[Data(x=torch.cat([make_rows(shape, width), one_hot(shape.kinds, 3)[:, : 3 * with_labels]], 1),
                  edge_index=shape.edge_index, y=torch.tensor([shape.label]))
             for shape in draw(count, low, high)]]  # fmt: skip


def make_zinc(dataset: Any) -> list[list[Data]]:
    """Make molecules with kinds of atoms and bonds."""
    return [[Data(x=shape.kinds[:, None], edge_index=shape.edge_index, edge_attr=make_bonds(shape, 4),
                  y=shape.kinds.float().mean().view(1)) for shape in draw(count, 9, 30)]
            for count in (256, 64, 65)]  # fmt: skip


def make_esol(dataset: Any) -> list[list[Data]]:
    """Make molecules by their formulas, such as `CCO`, from which a program makes features."""
    atoms = ("C", "N", "O")
    return [[Data(smiles="".join(atoms[kind] for kind in shape.kinds.tolist()), y=torch.full((1, 1), shape.label * 1.0))
             for shape in draw(400, 2, 12)]]  # fmt: skip


def make_molhiv(dataset: Any) -> list[list[Data]]:
    """Make molecules with OGB's nine columns of atoms, and write the split beside them."""
    folder = Path(dataset.root) / "split" / dataset.meta_info["split"]
    folder.mkdir(parents=True, exist_ok=True)
    places = torch.arange(600)
    torch.save({"train": places[:400], "valid": places[400:500], "test": places[500:]}, folder / "split_dict.pt")
    return [[Data(x=shape.kinds[:, None].repeat(1, 9) % 2, edge_index=shape.edge_index,
                  edge_attr=make_bonds(shape, 2)[:, None].repeat(1, 3), y=torch.tensor([[shape.label]]),
                  num_nodes=len(shape.kinds)) for shape in draw(600, 9, 30)]]  # fmt: skip


def make_upfd(dataset: Any) -> list[list[Data]]:
    """Make trees of news that spread."""
    return [[Data(x=make_rows(shape, 10), edge_index=shape.edge_index[:, shape.edge_index[0] < shape.edge_index[1]],
                  y=torch.tensor([shape.label])) for shape in draw(count, 5, 40)]
            for count in (120, 60, 121)]  # fmt: skip


def make_events(dataset: Any) -> list[list[Data]]:
    """Make events between entities; `pre_transform` sees them in the order of time."""
    random = torch.Generator().manual_seed(0)
    entities, kinds = torch.randint(30, (2, 700), generator=random), torch.randint(8, (700,), generator=random)
    rows = torch.stack([entities[0], kinds, (entities[0] + kinds) % 30, torch.arange(700) // 20], 1).tolist()
    events = [Data(sub=sub, rel=rel, obj=obj, t=time) for sub, rel, obj, time in rows]
    return [events[:500], events[500:600], events[600:]]


def make_interactions(dataset: Any) -> list[list[TemporalData]]:
    """Make events between users and pages that they come back to; no node has more of them in a batch than are kept."""
    random = torch.Generator().manual_seed(0)
    src = torch.randint(300, (2_400,), generator=random)
    dst = 300 + (src + torch.randint(3, (2_400,), generator=random)) % 200
    msg = one_hot(dst % 8, 8) + 0.1 * torch.randn(2_400, 8, generator=random)
    return [[TemporalData(src=src, dst=dst, t=torch.arange(2_400), msg=msg, y=src % 2)]]


def _write(dataset: Any, make: Any) -> None:
    """Generate what `process` of a data set writes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = make(dataset)
    if dataset.pre_transform is not None:
        made = [[dataset.pre_transform(graph) for graph in graphs] for graphs in made]
    if isinstance(dataset, datasets.TUDataset):
        data, slices = dataset.collate(made[0])
        torch.save((data.to_dict(), slices, dataset.sizes, Data), dataset.processed_paths[0])
    elif type(dataset).__name__ == "PygGraphPropPredDataset":
        torch.save(dataset.collate(made[0]), dataset.processed_paths[0])
    else:
        for graphs, path in zip(made, dataset.processed_paths, strict=True):
            dataset.save(graphs, path)


MAKERS: dict[Any, Any] = {
    datasets.TUDataset: make_tu,
    datasets.ZINC: make_zinc,
    datasets.MoleculeNet: make_esol,
    datasets.UPFD: make_upfd,
    datasets.GDELT: make_events,
    datasets.JODIEDataset: make_interactions,
    datasets.PPI: lambda dataset: make_ppi(0.05),
    datasets.Planetoid: lambda dataset: [[make_cora(0.04)]],
}


def generate() -> None:
    """Make PyG's classes of data sets, and one of OGB, generate graphs instead of downloading them."""
    makers = dict(MAKERS)
    try:
        from ogb.graphproppred import PygGraphPropPredDataset
    except ImportError:
        pass
    else:
        makers[PygGraphPropPredDataset] = make_molhiv
    for kind, make in makers.items():
        kind.download = lambda self: None
        kind.process = lambda self, make=make: _write(self, make)


def compare(small: Small, examples: Path, folder: Path, timeout: int) -> dict[str, list[str]]:
    """Run a program with both loaders, each in a folder of its own with its own data; returns the lines of scores.

    Raises:
        RuntimeError: a program ended before its last line.
    """
    lines = {}
    for loader in LOADERS:
        own = folder / loader / "examples"
        own.mkdir(parents=True)
        text = (examples / small.path).read_text()
        for old, new in small.edits if loader != "PyG" else ():
            text = text.replace(old, new)
        (own / small.path).write_text(text)
        begin = ["run"] if loader != "PyG" and not small.edits else []
        lines[loader] = run([*begin, str(own / small.path)], small, timeout)
    return lines


def run(arguments: list[str], small: Small, timeout: int) -> list[str]:
    """Run a program in a process of its own, until its last line of scores; returns these lines.

    Args:
        arguments: The program's path, behind `run` if it runs by `pyg_direct run`.
        small: The program.
        timeout: Seconds until it is ended.

    Raises:
        RuntimeError: it ended before its last line.
    """
    source, target = os.pipe()
    errors = Path(arguments[-1]).with_suffix(".errors")
    process = os.fork()
    if process == 0:
        # Its workers end with it.
        os.setsid()
        signal.alarm(timeout)
        os.dup2(target, 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        _begin(arguments)
    os.close(target)
    lines: list[str] = []
    with os.fdopen(source) as output:
        for line in output:
            if line.startswith(small.begins):
                lines.append(line.strip())
            if len(lines) == small.lines:
                break
        os.killpg(process, signal.SIGTERM)
    os.waitpid(process, 0)
    if len(lines) < small.lines:
        raise RuntimeError(f"{arguments} ended after {lines}: {errors.read_text()[-1500:]}")
    return lines


def _begin(arguments: list[str]) -> None:
    """Run a program in this process, and end it."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    generate()
    torch.set_num_threads(1)
    # OGB reads its file as torch did before 2.6.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(SEED)  # type: ignore[operator]
    program = arguments[-1]
    os.chdir(Path(program).parent)
    sys.path[0] = str(Path(program).parent)
    try:
        if arguments[0] == "run":
            sys.argv = ["pyg_direct", *arguments]
            runpy.run_module("pyg_direct", run_name="__main__", alter_sys=True)
        else:
            sys.argv = [program]
            runpy.run_path(program, run_name="__main__")
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


HEADER = ["| program | lines | equal | last line, plain | last line, by `run` | commit |",
          "| --- | ---: | ---: | --- | --- | --- |"]  # fmt: skip


def tabulate(results: dict[str, dict[str, list[str]]], before: str = "", commit: str = "unknown") -> str:
    """Lines of scores by program: how many are equal, and the last one, in Markdown.

    Args:
        results: Lines by program and loader.
        before: An earlier table, whose rows of other programs stay.
        commit: What the runs were made at.
    """
    rows = [row for row in before.splitlines() if row.startswith("| ") and row not in HEADER
            and row.split(" | ")[0].removeprefix("| ") not in results]  # fmt: skip
    for name, lines in results.items():
        plain, ours = lines.values()
        equal = sum(first == second for first, second in zip(plain, ours, strict=False))
        rows.append(f"| {name} | {max(len(plain), len(ours))} | {equal} | {plain[-1]} | "
                    f"{'the same' if ours[-1] == plain[-1] else ours[-1]} | {commit} |")  # fmt: skip
    return "\n".join([*HEADER, *rows]) + "\n"


def main(
    examples: Annotated[Path, typer.Argument(help="The folder `examples` of a checkout of PyG.")],
    only: Annotated[str, typer.Option(help="Parts of the names of the programs to run, by commas.")] = "",
    timeout: Annotated[int, typer.Option(help="Seconds for each run.")] = 600,
    out: Annotated[Path, typer.Option(help="Folder of the table.")] = HERE,
) -> None:
    """Run PyG's example programs over small graphs with PyG's loaders and with ours."""
    import torch_geometric

    from pyg_direct.bench.result_row import read_commit

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    path = out / f"small_programs_{'cpu' if device == 'CPU' else device.split()[-1].lower()}.md"
    head = ("# PyG's example programs over small graphs and events, line by line\n\nPyG "
            f"{torch_geometric.__version__}, torch {torch.__version__}, {device}, one thread; `python -m "
            "tests.compat.small_programs PATH`.\nData sets are generated, in the place of what their classes download. "
            "Each program runs\nonce plain and once by `pyg_direct run`, with equal seeds, and ends after a few lines "
            "of scores.\n\n")  # fmt: skip
    apart, failed = [], []
    for small in PROGRAMS:
        if not any(part in small.name for part in only.split(",")):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                lines = compare(small, examples, Path(folder), timeout)
            except RuntimeError as error:
                failed.append(small.name)
                print(error, flush=True)
                continue
        table = tabulate({small.name: lines}, path.read_text() if path.exists() else "", read_commit())
        path.write_text(head + table)
        print(table.splitlines()[-1], flush=True)
        if lines["PyG"] != lines["pyg_direct"]:
            apart.append(small.name)
    print(f"apart: {apart}, failed: {failed}")
    raise typer.Exit(int(bool(apart or failed)))


if __name__ == "__main__":
    typer.run(main)
