"""Generated data in the place of what PyG's classes of data sets download, small enough for a CPU.

`generate()` replaces `download` and `process` of these classes in this process; the programs that make them are not
changed. Equal classes and options give equal data.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import datasets
from torch_geometric.data import Data, HeteroData, TemporalData

from tests.compat.datasets import make_cora, make_flickr, make_mag, make_ppi, make_reddit


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


def make_typed(sizes: dict[str, int], relations: Iterable[tuple[str, str, str]], num_edges: int) -> HeteroData:
    """Make nodes of types, and relations without an edge twice, each with its reverse if that is listed, too.

    Args:
        sizes: Nodes of each type.
        relations: Types of edges.
        num_edges: Edges of each relation, of which repeated ones are left out.
    """
    data = HeteroData()
    for name, size in sizes.items():
        data[name].num_nodes = size
    random = torch.Generator().manual_seed(1)
    for source, relation, target in relations:
        ends = torch.stack([torch.randint(sizes[name], (num_edges,), generator=random) for name in (source, target)])
        # Half of the edges join nodes of a class: the number of a node, by 4.
        ends[1, ::2] = ends[1, ::2] // 4 * 4 + ends[0, ::2] % 4
        ends[1].clamp_(max=sizes[target] - 1)
        data[source, relation, target].edge_index = ends.unique(dim=1).contiguous()
    return data


def show_class(size: int, width: int) -> Tensor:
    """Make features that show the class of a node in four, float32 `[size, width]`."""
    rows = 0.5 * torch.randn(size, width)
    rows[torch.arange(size), torch.arange(size) % 4] += 1
    return rows


def add_split(store: Any, size: int, num_classes: int = 4) -> None:
    """Add labels and masks to nodes: half of them to train, a quarter each to validate and to test."""
    part = torch.arange(size) // 4 % 4
    store.y = torch.arange(size) % 4 % num_classes
    store.train_mask, store.val_mask, store.test_mask = part < 2, part == 2, part == 3


def make_dblp(dataset: Any) -> list[list[HeteroData]]:
    """Make authors, whose fields are to be found, with papers, terms and conferences."""
    data = make_typed({"author": 200, "paper": 300, "term": 80, "conference": 12},
                      [("author", "to", "paper"), ("paper", "to", "author"), ("paper", "to", "term"),
                       ("paper", "to", "conference"), ("term", "to", "paper"), ("conference", "to", "paper")],
                      900)  # fmt: skip
    for name, width in (("author", 33), ("paper", 42), ("term", 5)):
        data[name].x = show_class(data[name].num_nodes, width)
    add_split(data["author"], 200)
    return [[data]]


def make_imdb(dataset: Any) -> list[list[HeteroData]]:
    """Make movies, whose kinds are to be found, with directors and actors."""
    data = make_typed({"movie": 240, "director": 60, "actor": 120},
                      [("movie", "to", "director"), ("movie", "to", "actor"), ("director", "to", "movie"),
                       ("actor", "to", "movie")], 700)  # fmt: skip
    for name in data.node_types:
        data[name].x = show_class(data[name].num_nodes, 30)
    add_split(data["movie"], 240, 3)
    return [[data]]


def make_aminer(dataset: Any) -> list[list[HeteroData]]:
    """Make papers of authors and venues, some of whose fields are known."""
    relations = [("paper", "written_by", "author"), ("author", "writes", "paper"),
                 ("paper", "published_in", "venue"), ("venue", "publishes", "paper")]  # fmt: skip
    data = make_typed({"author": 200, "paper": 400, "venue": 20}, relations, 800)
    for name in ("author", "venue"):
        size = data[name].num_nodes
        data[name].y, data[name].y_index = torch.arange(size) % 4, torch.arange(size)
    return [[data]]


def make_movielens(dataset: Any) -> list[list[HeteroData]]:
    """Make users who rate movies, at times of their own."""
    links = ("user", "rates", "movie")
    data = make_typed({"user": 150, "movie": 90}, [links], 2_500)
    data["movie"].x = show_class(90, 24)
    source, target = data[links].edge_index
    data[links].edge_label = (source + target) % 5 + 1
    data[links].time = torch.arange(len(source)) * 7 % len(source)
    return [[data]]


def make_books(dataset: Any) -> list[list[HeteroData]]:
    """Make users and the books that they read, and more of them to test."""
    links = ("user", "rates", "book")
    data = make_typed({"user": 150, "book": 90}, [links], 2_000)
    edges = data[links].edge_index
    data[links].edge_index, data[links].edge_label_index = edges[:, 1:], edges[:, ::9]
    data["book", "rated_by", "user"].edge_index = edges[:, 1:].flip(0)
    return [[data]]


def make_taobao(dataset: Any) -> list[list[HeteroData]]:
    """Make users, items that they look at, and categories of items."""
    data = make_typed({"user": 150, "item": 90, "category": 8},
                      [("user", "to", "item"), ("item", "to", "category")], 6_000)  # fmt: skip
    size = data["user", "item"].num_edges
    data["user", "item"].time, data["user", "item"].behavior = torch.arange(size), torch.arange(size) % 4
    return [[data]]


def make_entities(dataset: Any) -> list[list[Data]]:
    """Make a graph of relations and their reverse ones, and entities of four classes, which the relations show."""
    random = torch.Generator().manual_seed(2)
    edge_index, edge_type = torch.randint(300, (2, 1_500), generator=random), torch.arange(1_500) % 8
    edge_index[1] = edge_index[1] // 4 * 4 + edge_type % 4
    nodes = torch.arange(300)
    train, test = nodes[nodes // 4 % 2 == 0], nodes[nodes // 4 % 2 == 1]
    return [[Data(edge_index=torch.cat([edge_index, edge_index.flip(0)], 1),
                  edge_type=torch.cat([2 * edge_type, 2 * edge_type + 1]), num_nodes=300, train_idx=train,
                  train_y=train % 4, test_idx=test, test_y=test % 4)]]  # fmt: skip


def make_triples(count: int) -> tuple[Tensor, Tensor]:
    """Make links of 40 entities by relations that add to the number of an entity, int64 `[2, count]` and `[count]`."""
    random = torch.Generator().manual_seed(3)
    head, kind = torch.randint(40, (count,), generator=random), torch.randint(5, (count,), generator=random)
    return torch.stack([head, (head + kind + 1) % 40]), kind


def make_knowledge(dataset: Any) -> list[list[Data]]:
    """Make links of entities, to train on, to validate and to test."""
    edge_index, edge_type = make_triples(700)
    return [[Data(edge_index=edge_index[:, part], edge_type=edge_type[part], num_nodes=40)]
            for part in (slice(500), slice(500, 600), slice(600, 700))]  # fmt: skip


def make_linked(dataset: Any) -> list[list[Data]]:
    """Make the same links in one graph, which has those to train on both ways."""
    edge_index, edge_type = make_triples(700)
    parts = {"train": slice(500), "valid": slice(500, 600), "test": slice(600, 700)}
    links = {f"{name}_edge_index": edge_index[:, part] for name, part in parts.items()}
    kinds = {f"{name}_edge_type": edge_type[part] for name, part in parts.items()}
    train, kind = links["train_edge_index"], kinds["train_edge_type"]
    return [[Data(edge_index=torch.cat([train, train.flip(0)], 1), edge_type=torch.cat([kind, kind + 5]),
                  num_nodes=40, **links, **kinds)]]  # fmt: skip


def make_trust(dataset: Any) -> list[list[Data]]:
    """Make who trusts whom, in six graphs over the same nodes."""
    random = torch.Generator().manual_seed(4)
    graphs = []
    for _ in range(6):
        edge_index = torch.randint(80, (2, 200), generator=random)
        graphs.append(Data(edge_index=edge_index, edge_attr=1 - 2 * (edge_index.sum(0) % 3 == 0).long(), num_nodes=80))
    return [graphs]


def make_molecules(dataset: Any) -> list[list[Data]]:
    """Make molecules with 19 targets and kinds of bonds."""
    return [[Data(x=make_rows(shape, 11), edge_index=shape.edge_index, edge_attr=one_hot(make_bonds(shape, 4), 4),
                  pos=torch.rand(len(shape.kinds), 3), z=shape.kinds + 6,
                  y=shape.kinds.float().mean() * torch.ones(1, 19))
             for shape in draw(20_400, 4, 5)]]  # fmt: skip


def make_wiki(dataset: Any) -> list[list[Data]]:
    """Make a directed graph whose nodes have ten splits."""
    data = make_cora(0.1)
    for name in ("train_mask", "val_mask", "test_mask"):
        data[name] = data[name][:, None].repeat(1, 10)
    data.edge_index = data.edge_index[:, ::2]
    return [[data]]


def make_node_property(dataset: Any) -> list[list[Data]]:
    """Make a graph with OGB's columns of labels, and write the split beside it."""
    folder = Path(dataset.root) / "split" / dataset.meta_info["split"]
    folder.mkdir(parents=True, exist_ok=True)
    data = make_cora(0.2)
    torch.save({"train": data.train_mask.nonzero()[:, 0], "valid": data.val_mask.nonzero()[:, 0],
                "test": data.test_mask.nonzero()[:, 0]}, folder / "split_dict.pt")  # fmt: skip
    return [[Data(x=data.x[:, :100], edge_index=data.edge_index, y=data.y[:, None], num_nodes=data.num_nodes)]]


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
    elif type(dataset).__name__.startswith("Pyg"):
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
    datasets.Planetoid: lambda dataset: [[make_cora(0.1)]],
    datasets.Reddit: lambda dataset: [[make_reddit(0.003)]],
    datasets.Flickr: lambda dataset: [[make_flickr(0.01)]],
    datasets.OGB_MAG: lambda dataset: [[make_mag(0.002)]],
    datasets.DBLP: make_dblp,
    datasets.IMDB: make_imdb,
    datasets.AMiner: make_aminer,
    datasets.MovieLens: make_movielens,
    datasets.AmazonBook: make_books,
    datasets.Taobao: make_taobao,
    datasets.Entities: make_entities,
    datasets.FB15k_237: make_knowledge,
    datasets.RelLinkPredDataset: make_linked,
    datasets.BitcoinOTC: make_trust,
    datasets.QM9: make_molecules,
    datasets.LINKXDataset: make_wiki,
    datasets.WikipediaNetwork: make_wiki,
}


def generate() -> None:
    """Make PyG's classes of data sets, and one of OGB, generate graphs instead of downloading them."""
    makers = dict(MAKERS)
    try:
        from ogb.graphproppred import PygGraphPropPredDataset
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError:
        pass
    else:
        makers |= {PygGraphPropPredDataset: make_molhiv, PygNodePropPredDataset: make_node_property}
    for kind, make in makers.items():
        kind.download = lambda self: None
        kind.process = lambda self, make=make: _write(self, make)
