"""`random_walk` walks on topologies and pairs of arrays, with the chances of node2vec whatever the order of rows."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from pyg_direct import CSRTopo, random_walk
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.sampling.random_walks import MetapathWalks
from tests.reference import walks as reference

EDGES = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 4], [3, 2, 1, 0, 2, 4, 1, 0, 0, 2, 4, 2]])
PLACES = [pytest.param("cpu", "cpu"), *(pytest.param("cuda", place, marks=pytest.mark.gpu)
                                        for place in ("cuda", "pinned", "unified"))]  # fmt: skip


def list_rows(edges, num_nodes):
    return [edges[1][edges[0] == node].tolist() for node in range(num_nodes)]


@pytest.mark.parametrize(("device", "placement"), PLACES)
def test_uniform_walks_are_those_of_the_reference(device, placement):
    topology = CSRTopo(EDGES, num_nodes=6, direction="out")
    start = torch.tensor([5, 0, 4, 2, 3])

    got = random_walk(topology, start, 6, seed=9, device=device, placement=placement)

    rows = list_rows(EDGES, 6)
    assert got.tolist() == [reference.walk(rows, int(node), 6, (1, 1, 1), 9, w) for w, node in enumerate(start)]


@pytest.mark.parametrize(("device", "placement"), PLACES)
def test_biased_walks_are_those_of_sorted_rows(device, placement):
    topology = CSRTopo(EDGES, num_nodes=6, direction="out")
    rows = [sorted(row) for row in list_rows(EDGES, 6)]
    start = [0, 1, 2, 3, 4, 5]

    for _ in range(2):
        got = random_walk(topology, start, 5, 0.5, 2.0, seed=9, device=device, placement=placement)

        weights = reference.weights_of(0.5, 2.0)
        assert got.tolist() == [reference.walk(rows, node, 5, weights, 9, node) for node in start]


def test_rows_that_are_given_as_arrays_are_walked_as_they_are(real_device):
    topology = CSRTopo(EDGES, num_nodes=6, direction="out")
    pair = topology.indptr, topology.indices

    for p, q in ((1, 1), (0.5, 2)):
        got = random_walk(pair, [0, 4], 7, p, q, seed=1, device=real_device)
        assert torch.equal(got.cpu(), random_walk(topology, [0, 4], 7, p, q, seed=1, device="cpu"))


def test_rows_that_are_written_to_are_sorted_anew():
    indptr, indices = torch.tensor([0, 2, 3, 4]), torch.tensor([2, 1, 0, 0], dtype=torch.int32)
    topology = CSRTopo(indptr=indptr, indices=indices)
    walks = [random_walk(topology, [0] * 50, 6, 0.5, 2.0, seed=1, device="cpu")]

    indices[:2] = 0
    walks.append(random_walk(topology, [0] * 50, 6, 0.5, 2.0, seed=1, device="cpu"))
    indices[0] = 5

    assert set(walks[0].unique().tolist()) == {0, 1, 2}
    assert set(walks[1].unique().tolist()) == {0}
    with pytest.raises(IdError, match=r"indices must lie in \[0, 3\), got 5"):
        random_walk(topology, [0], 2, device="cpu")


@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (0.5, 2.0)])
def test_writes_that_torch_does_not_count_are_followed_or_refused(p, q):
    indptr, indices = torch.tensor([0, 2, 3, 4]), torch.tensor([2, 1, 0, 0], dtype=torch.int32)
    topology = CSRTopo(indptr=indptr, indices=indices)

    def walk_from(node):
        return random_walk(topology, [node] * 50, 6, p, q, seed=1, device="cpu")

    walk_from(0)
    indices.numpy()[:2] = 1
    assert set(walk_from(0).unique().tolist()) == {0, 1}
    indptr.numpy()[1:3] = 0, 3
    assert walk_from(0).unique().tolist() == [0]

    indptr.numpy()[1:] = 10**9
    with pytest.raises(ArgumentError, match="indptr must run from 0 to the number of edges 4"):
        walk_from(0)


def test_no_write_leads_a_walk_beyond_the_arrays():
    indptr = torch.arange(0, 200_001, 2)
    indices = torch.arange(200_000, dtype=torch.int32) % 100_000
    topology = CSRTopo(indptr=indptr, indices=indices)
    random_walk(topology, [0], 6, device="cpu")

    # Hardly any of these is among the samples that are compared.
    indptr.numpy()[50_001], indices.numpy()[100_000:100_002] = 10**15, 10**9

    with pytest.raises((ArgumentError, IdError)):
        random_walk(topology, [50_000] * 9, 6, device="cpu")


def test_without_a_seed_walks_follow_torch():
    topology = CSRTopo(EDGES, num_nodes=6, direction="out")

    torch.manual_seed(3)
    first, second = (random_walk(topology, [0] * 20, 9, device="cpu") for _ in range(2))
    torch.manual_seed(3)

    assert torch.equal(first, random_walk(topology, [0] * 20, 9, device="cpu"))
    assert not torch.equal(first, second)


def test_steps_have_the_chances_of_node2vec():
    rows = list_rows(EDGES, 5)
    topology = CSRTopo(EDGES, num_nodes=5, direction="out")

    got = random_walk(topology, torch.arange(5).repeat(20_000), 2, 0.25, 3.0, seed=5, device="cpu")

    found = {}
    for before, node, following in got.tolist():
        found.setdefault((before, node), Counter())[following] += 1
    for (before, node), counts in found.items():
        chances = reference.find_chances(rows, before, node, Fraction(1, 4), Fraction(3))
        total, tail = sum(counts.values()), math.log(10**9)
        square = sum((counts[other] - total * c) ** 2 / (total * c) for other, c in chances.items())
        degrees = len(chances) - 1
        # Exceeded by chance once in 10**9 (Laurent and Massart, 2000, lemma 1).
        assert float(square) <= degrees + 2 * math.sqrt(degrees * tail) + 2 * tail * (degrees > 0), (before, node)


def test_walks_along_relations_join_their_rows(real_device):
    rows = {("a", "to", "b"): [[1, 0], [], [2, 2]], ("b", "to", "a"): [[0], [2, 1], []]}
    arrays = {kind: (torch.tensor(np.cumsum([0, *map(len, own)])), torch.tensor([n for row in own for n in row]))
              for kind, own in rows.items()}  # fmt: skip
    metapath = list(rows)
    walks = MetapathWalks(arrays, metapath, 5, 3, real_device)
    start = [0, 1, 2, 0, 0]

    got = walks.walk(torch.tensor(start, device=real_device), key=4)

    relations = [rows[metapath[step % 2]] for step in range(5)]
    assert got.tolist() == [reference.walk_along(relations, node, 4, w) for w, node in enumerate(start)]


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"topology": EDGES}, ArgumentTypeError, "topology must be a CSRTopo or a pair .*, got Tensor"),
    ({"topology": (torch.tensor([0, 2]), torch.tensor([0, 1]))}, IdError, r"indices must lie in \[0, 1\), got 1"),
    ({"topology": (torch.tensor([0, 3]), torch.tensor([0]))}, ArgumentError, "indptr must run from 0"),
    ({"start": [6]}, IdError, r"start must lie in \[0, 6\), got 6"),
    ({"start": [-1]}, IdError, r"start must lie in \[0, 6\), got -1"),
    ({"start": [0.5]}, ArgumentTypeError, "start must have dtype int64 or int32"),
    ({"walk_length": -1}, ArgumentError, "walk_length"),
    ({"p": -1.0}, ArgumentError, "p must be finite and above 0, got -1.0"),
    ({"seed": 0.5}, ArgumentTypeError, "seed must be an integer or None, got 0.5"),
    ({"placement": "cuda"}, ArgumentError, "placement must be one that device=cpu can read"),
])  # fmt: skip
def test_bad_arguments_are_named(options, error, words):
    topology = CSRTopo(EDGES, num_nodes=6, direction="out")

    with pytest.raises(error, match=words):
        random_walk(**{"topology": topology, "start": [0], "walk_length": 2, "device": "cpu", **options})


@pytest.mark.gpu
def test_starts_on_a_gpu_are_looked_at():
    topology = CSRTopo(EDGES, num_nodes=6, direction="out")

    with pytest.raises(IdError, match=r"start must lie in \[0, 6\), got 6"):
        random_walk(topology, torch.tensor([0, 6], device="cuda"), 3)
