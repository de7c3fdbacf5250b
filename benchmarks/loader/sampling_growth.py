"""Growth of sampling with edges, batch size, the degree of hubs, and the number of node ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pyg_direct.bench.limits import replay_seconds, time_on_clock
from pyg_direct.bench.result_row import Row
from pyg_direct.bench.sampling import FANOUTS, sample_ahead
from pyg_direct.datasets.synthetic import PRESETS, fill_edges
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_plan import GpuPlan, open_plan

_BATCHES = 20
_BATCH_SIZES = tuple(1 << bits for bits in range(6, 17))
_NUM_EDGES = (1 << 20, 1 << 23, 1 << 26, 1 << 29, PRESETS["papers100M"].num_edges)
_DEGREES = tuple(10**digits for digits in range(2, 8))
_NUM_IDS = (10**6, 10**7, 10**8, 10**9)


def measure_papers() -> Iterator[Row]:
    """Measure a graph of papers100M's size, in GPU memory and on the host."""
    topology = draw_papers(1.0)
    for placement, fanouts in (("cuda", FANOUTS), ("cuda", (20, 15, 10)), ("unified", FANOUTS)):
        placed = topology.place(placement, "cuda")
        case = f"sampling/papers100M/{placement}/{list(fanouts)}/1024"
        yield from measure_times(placed, Recipe(fanouts), case, 1024)


def measure_growth() -> Iterator[Row]:
    """Measure the four curves, all with topology in GPU memory."""
    yield from measure_edges()
    yield from measure_batch_sizes()
    yield from measure_hubs()
    yield from measure_id_spaces()


def measure_times(placed: PlacedTopology, recipe: Recipe, case: str, num_seeds: int, *, curve: str = "",
                  at: float | None = None, at_name: str = "", seeds: Callable[[], torch.Tensor] | None = None,
                  ) -> Iterator[Row]:  # fmt: skip
    """Measure the time of a batch, alone and one batch ahead, the edges a second and the plan's memory."""
    plan = open_plan(placed, recipe)
    assert isinstance(plan, GpuPlan)
    draw = seeds or (lambda: torch.randint(placed.num_nodes, (num_seeds,)))
    batches = [draw() for _ in range(_BATCHES)]
    edges = [plan.sample(batch, number).edge_counts[-1] for number, batch in enumerate(batches)]
    numbers = iter(range(10**6))

    def sample_one() -> None:
        number = next(numbers) % _BATCHES
        plan.sample(batches[number], number)

    alone = time_on_clock(sample_one, _BATCHES)
    ahead = [t / _BATCHES for t in time_on_clock(lambda: sample_ahead(plan, batches), 5, 1)]
    graph = plan._slots[0].graph
    assert graph is not None
    floor = 1e3 * replay_seconds(graph.num_nodes), f"replay of {graph.num_nodes} empty kernels"
    on_curve: dict[str, Any] = {"curve": curve, "at": at, "at_name": at_name}
    yield Row.of(case, "time, alone", "ms", [1e3 * t for t in alone], *floor, **on_curve)
    yield Row.of(case, "time, one batch ahead", "ms", [1e3 * t for t in ahead], *floor, **on_curve)
    yield Row.of(case, "edges, sustained", "G/s", [sum(edges) / _BATCHES / t / 1e9 for t in ahead])
    memory = (plan.num_bytes + plan.num_scratch_bytes) / 1e6
    yield Row.of(case, "GPU memory of plan and scratch", "MB", [memory], note="two batches on their way")


def measure_edges() -> Iterator[Row]:
    """Measure 1 M to 1.6 G edges in papers100M's shape."""
    for num_edges in _NUM_EDGES:
        topology = draw_papers(num_edges / PRESETS["papers100M"].num_edges)
        yield from measure_times(topology.place("cuda", "cuda"), Recipe(FANOUTS), f"growth/edges/{num_edges}", 1024,
                                 curve="growth with edges", at=num_edges, at_name="edges")  # fmt: skip


def measure_batch_sizes() -> Iterator[Row]:
    """Measure 64 to 65,536 seeds on a graph of 134 M edges."""
    placed = draw_papers(2**27 / PRESETS["papers100M"].num_edges).place("cuda", "cuda")
    for num_seeds in _BATCH_SIZES:
        yield from measure_times(placed, Recipe(FANOUTS), f"growth/batch/{num_seeds}", num_seeds,
                                 curve="growth with batch size", at=num_seeds, at_name="seeds a batch")  # fmt: skip


def measure_hubs() -> Iterator[Row]:
    """Measure rows of degree 10^2 to 10^7 at equal fanout: 128 of them, each eight times among the seeds."""
    num_hubs, num_nodes = 128, 1 << 22
    for degree in _DEGREES:
        indptr = torch.full((num_nodes + 1,), num_hubs * degree, device="cuda")
        indptr[: num_hubs + 1] = torch.arange(num_hubs + 1, device="cuda") * degree
        indices = torch.empty(num_hubs * degree, dtype=torch.int32, device="cuda").random_(num_nodes)
        placed = CSRTopo(indptr=indptr, indices=indices).place("cuda", "cuda")
        yield from measure_times(placed, Recipe((15,)), f"growth/degree/{degree}", 1024, curve="growth with degree",
                                 at=degree, at_name="degree of every seed",
                                 seeds=lambda: torch.arange(num_hubs).repeat(8))  # fmt: skip


def measure_id_spaces() -> Iterator[Row]:
    """Measure 10^6 to 10^9 node ids; a million of them, spread over all, have a hundred edges each among themselves."""
    num_alive, degree = 10**6, 100
    for num_nodes in _NUM_IDS:
        spread = num_nodes // num_alive

        def draw_seeds(spread: int = spread) -> torch.Tensor:
            return torch.randint(num_alive, (1024,)) * spread

        indptr = torch.arange(num_nodes + 1, device="cuda").add_(spread - 1).div_(spread, rounding_mode="floor")
        indptr.mul_(degree)
        indices = torch.empty(num_alive * degree, dtype=torch.int32, device="cuda").random_(num_alive).mul_(spread)
        placed = PlacedTopology(indptr, indices, indices[:0], "cuda")
        yield from measure_times(placed, Recipe(FANOUTS), f"growth/ids/{num_nodes}", 1024, curve="growth with node ids",
                                 at=num_nodes, at_name="node ids",
                                 seeds=draw_seeds)  # fmt: skip


def draw_papers(scale: float) -> CSRTopo:
    """Draw a topology of papers100M's shape at a scale, compressed on the GPU."""
    preset = PRESETS["papers100M"]
    num_nodes, num_edges = int(preset.num_nodes * scale), int(preset.num_edges * scale)
    generator = torch.Generator("cuda").manual_seed(1)
    edge_index = torch.empty(2, num_edges, dtype=torch.int32, device="cuda")
    starts = torch.linspace(0, num_nodes, preset.num_classes + 1, dtype=torch.float64, device="cuda").floor()
    order = torch.randperm(num_nodes, device="cuda", generator=generator)
    fill_edges(edge_index, starts, order, homophily=preset.homophily, hub=preset.hub, directed=True,
               generator=generator)  # fmt: skip
    return CSRTopo(edge_index, num_nodes=num_nodes)
