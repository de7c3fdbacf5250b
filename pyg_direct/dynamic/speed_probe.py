"""Speeds of a device (see `dynamic/group_tuner.py`), measured once and kept on disk."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_direct.cache_folder import recall
from pyg_direct.compiler.jit import get_cpu_threads, set_cpu_threads
from pyg_direct.dynamic.conv_operators import Factors
from pyg_direct.dynamic.group_tuner import (
    FOOTPRINTS,
    LACKING,
    SCANNED,
    SCANNED_CSR,
    TRIED,
    TRIED_VALUES,
    WIDTHS,
    Speeds,
    expect_options,
)
from pyg_direct.dynamic.matrix_group import GROUP_SIZES, build_group
from pyg_direct.ops.snapshots.aggregate import SMALL, SnapshotMatrices, aggregate_snapshots
from pyg_direct.ops.snapshots.slice_csr import MAX_GROUP, slice_keys, unite
from pyg_direct.profiling import time_call, time_on_stream

# Most nodes; rows of few numbers stay below the largest of these sizes. Least edges, and least products of them: so
# many that all threads of a CPU take part. On a GPU a launch is then negligible. Ten edges a node, but no more than so
# many.
_NODES = {"cpu": 500_000, "cuda": 1_000_000}
_EDGES = {"cpu": 20_000, "cuda": 1_000_000}
_MANY = {"cpu": 200_000, "cuda": 10_000_000}
_PRODUCTS = {"cpu": SMALL, "cuda": 2**22}
# Bytes that are written, and how often, so that a GPU is busy for two milliseconds.
_BUSY, _FILLS = 2**28, 24
# Nodes of a sequence that is aggregated as a whole.
_TRIED_NODES = 50_000
# Stands in for 0 s of an edge on a logarithmic scale.
_NOTHING = 1e-15
# Sizes of the measurement.
_VERSION = {"cpu": 8, "cuda": 16}


def find_speeds(device: torch.device) -> Speeds:
    """Return the speeds of a device, measured at the first call on this machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"

    def is_valid(kept: Any) -> bool:
        table = kept.get("seconds_of_edge") if isinstance(kept, dict) and kept.keys() == names else None
        rows = len(FOOTPRINTS[device.type])
        return isinstance(table, list) and [len(row) for row in table] == [len(WIDTHS)] * rows

    names = {field.name for field in fields(Speeds)}
    kept = recall("snapshots", f"{name} {_VERSION[device.type]}", lambda: asdict(_measure(device)), is_valid)
    known: dict[str, Any] = {key: _make_tuples(value) for key, value in kept.items()}
    return Speeds(**known)


def _make_tuples(value: Any) -> Any:
    """Restore tuples that JSON stored as lists."""
    return tuple(map(_make_tuples, value)) if isinstance(value, list) else value


def _measure(device: torch.device) -> Speeds:
    table, test, few, threads = _measure_edges(device)
    ones = torch.ones(2, device="cpu")
    first, second = (Factors(torch.tensor([key], device="cpu"), None, ones, ones, ones) for key in (0, 1))
    alone, split = (build_group(f, 2) for f in ([first], [first._replace(keys=torch.arange(2, device="cpu")), second]))
    rows = [torch.zeros(2, 1, device=device)] * 2
    here = [partial(run_group, rows, group.to(device)) for group in (alone, split)]
    footprints = FOOTPRINTS[device.type]
    rate = send = more = convert = csr = floor = floor_more = 0.0
    scans: tuple[tuple[float, ...], ...] = ()
    scans_csr: tuple[tuple[float, ...], ...] = ()
    if device.type == "cpu":
        # Alone, because the cost of its size is measured.
        call = _time(here[0], device)
        rounds = [[_time_numbers(size, device) for size in footprints] for _ in range(3)]
        least = [min(times) for times in zip(*rounds, strict=True)]
        (numbers,) = level([[max(0.0, seconds - call) / count for count, seconds in least]])
    measure = _time_in_turn if device.type == "cuda" else _time
    call, two = (measure(work, device) for work in here)
    if device.type == "cuda":
        sent, sent_two = (measure(partial(run_group, rows, group), device) for group in (alone, split))
        send = max(0.0, sent - call)
        more = max(0.0, sent_two - two - send)
        host = torch.zeros(1 << 24, dtype=torch.uint8, device="cpu")
        rate = host.numel() / _time(partial(host.to, device), device)
        convert = max(0.0, _time_in_turn(lambda: alone.to(device).pieces[0].csr, device)
                      - _time_in_turn(lambda: alone.to(device), device))  # fmt: skip
        x, group = torch.zeros(2, 1, 16, device=device), alone.to(device)
        # Sums over CSR of any number of edges are equal at every call.
        few_csr, few_slices = (_time_in_turn(partial(aggregate_snapshots, x, group, 0, deterministic=csr), device)
                               for csr in (True, False))  # fmt: skip
        csr = max(0.0, few_csr - few_slices)
        floor, floor_two = (_time_behind(work, device) for work in here)
        floor_more = max(0.0, floor_two - floor)
        # Features exceed the caches if their numbers take the time; and kernels that pass over many numbers take some
        # time to begin and to end.
        (some, seconds), (many, longer) = (_time_numbers(size, device) for size in footprints[-2:])
        per_number = (longer - seconds) / (many - some)
        numbers, floor = [per_number] * len(footprints), max(floor, seconds - some * per_number)
    known = Speeds(table, test, call, max(0.0, two - call), rate, few, footprints, send, more, threads, tuple(numbers),
                   device.type == "cuda", convert_seconds=convert, csr_seconds=csr, floor_seconds=floor,
                   floor_more_seconds=floor_more)  # fmt: skip
    if device.type == "cuda":
        # So few numbers that a union is read as slices, and so many that it is read over CSR.
        scans = _measure_scans(known, SCANNED, footprints[1], device)
        scans_csr = _measure_scans(known, SCANNED_CSR, footprints[2], device)
        known = replace(known, scan_seconds=scans, scan_csr_seconds=scans_csr,
                        again_seconds=_measure_again(known, device))  # fmt: skip
        known = replace(known, factors=tuple(_measure_factors(known, values, device) for values in TRIED_VALUES))
    return known


def _measure_scans(speeds: Speeds, widths: Sequence[int], footprint: int,
                   device: torch.device) -> tuple[tuple[float, ...], ...]:  # fmt: skip
    """Measure seconds of an edge that some of eight snapshots lack, beyond the seconds of its row; a row for each
    number of these, at several widths of all eight.
    """
    table = []
    for lacking in LACKING:
        drawn = [_draw(width, footprint, 8 - lacking, 0.5, device) for width in widths]
        seconds = _subtract([partial(aggregate_snapshots, x, group) for x, group in drawn],
                            [partial(aggregate_snapshots, x, _empty(group)) for x, group in drawn], device)  # fmt: skip
        counts = [group.pieces[0].num_edges + group.pieces[0].num_slices for _, group in drawn]
        table.append([max(_NOTHING, s / count - speeds.per_edge(width * (1 - lacking / 8), footprint))
                      for s, count, width in zip(seconds, counts, widths, strict=True)])  # fmt: skip
    return tuple(map(tuple, table))


def _measure_again(speeds: Speeds, device: torch.device) -> float:
    """Measure seconds of each of 32 numbers of 4 snapshots to which separate edges, one a node, add, beyond the seconds
    of these edges.
    """
    footprint, width, size = speeds.footprints[2], 32, 4
    num_nodes = footprint // (4 * size * width)
    ones = torch.ones(num_nodes, device=device)
    shared = _draw_keys(num_nodes, 10 * num_nodes, device)
    own = [torch.cat([shared, _draw_keys(num_nodes, num_nodes, device, seed)]).unique() for seed in range(1, 1 + size)]
    rows = [torch.zeros(num_nodes, width, device=device)] * size
    groups = [build_group([Factors(keys, None, ones, ones, ones) for keys in part], num_nodes)
              for part in (own, [shared] * size)]  # fmt: skip
    both, one = (_time_behind(partial(run_group, rows, group), device) for group in groups)
    edges = sum(keys.numel() for keys in own) - size * shared.numel()
    numbers = num_nodes * size * width
    beyond = both - one - speeds.floor_more_seconds - 2 * edges * speeds.per_edge(width, footprint)
    return max(0.0, beyond) / numbers


def _measure_factors(speeds: Speeds, values: str, device: torch.device) -> tuple[tuple[float, ...], ...]:
    """Measure the factor of the time of eight snapshots over the expected one, in groups of every size and form.

    A tenth of the edges changes from one to the next, and rows are scaled as in GCN, differently in each.
    """
    # For the device alone.
    free = replace(speeds, call_seconds=0.0, launch_seconds=0.0, csr_seconds=0.0, bytes_per_second=0.0)
    drawn = _draw_edges(_TRIED_NODES, 17 * _TRIED_NODES, device)
    parts = [drawn[time * _TRIED_NODES :][: 10 * _TRIED_NODES].unique() for time in range(MAX_GROUP)]
    scales = [torch.linspace(0.5, 1.0 + time, _TRIED_NODES, device=device) for time in range(MAX_GROUP)]
    weights = [None if values == "ones" else (keys % 8 + (2 + time if values == "stacked" else 2)).float()
               for time, keys in enumerate(parts)]  # fmt: skip
    given = [Factors(keys, weight, scale, scale, scale * scale)
             for keys, weight, scale in zip(parts, weights, scales, strict=True)]  # fmt: skip
    # As many as a sequence has, so that none is in a cache only because it was read a moment ago.
    features = [[torch.zeros(_TRIED_NODES, channels, device=device) for _ in parts] for channels in TRIED]
    table = []
    for form, sizes in (("mask", GROUP_SIZES), ("split", GROUP_SIZES[1:])):
        for size in sizes:
            places = range(0, MAX_GROUP, size)
            unions = [unite(parts[first : first + size]) for first in places]
            groups = [build_group(given[first : first + size], _TRIED_NODES, form, union=union)
                      for first, union in zip(places, unions, strict=True)]  # fmt: skip
            counts = [sum(keys.numel() for keys in parts[first : first + size]) for first in places]
            row = []
            for channels, rows in zip(TRIED, features, strict=True):
                expected = (option.seconds for union, count in zip(unions, counts, strict=True)
                            for option in expect_options(union, count, channels, 0, free, values, _TRIED_NODES)
                            if option.form == form)  # fmt: skip
                row.append(_time_behind(partial(_run_groups, rows, groups), device, 2) / sum(expected))
            table.append(tuple(row))
    return tuple(table)


def _run_groups(features: Sequence[Tensor], groups: Sequence[SnapshotMatrices]) -> None:
    """Aggregate groups of as many snapshots each, one after the other."""
    size = groups[0].num_snapshots
    for number, group in enumerate(groups):
        run_group(features[number * size :], group)


def _measure_edges(device: torch.device) -> tuple[tuple[tuple[float, ...], ...], float, float, float]:
    """Measure seconds of edges, of starting them, the factor of one thread, and seconds until all have begun."""
    footprints = FOOTPRINTS[device.type]
    cells = [(width, footprint, 0, 1) for footprint in footprints for width in WIDTHS]
    # Rows of 8 snapshots and 4 numbers in each, all of which each edge has, and equally wide rows of one; then four
    # times as many of these.
    cells += [(32, footprints[0], 8, 1), (32, footprints[0], 0, 1), (32, footprints[0], 0, 4)]
    drawn = [_draw(*cell, device) for cell in cells]
    runs: list[Callable[[], Any]] = [partial(aggregate_snapshots, x, group) for x, group in drawn]
    rest: list[Callable[[], Any]] = [partial(aggregate_snapshots, x, _empty(group)) for x, group in drawn]
    # The last but one again, by one thread.
    runs.append(partial(_run_alone, runs[-2]))
    rest.append(rest[-2])
    *seconds, plain, many, alone = _subtract(runs, rest, device)
    *counts, few_edges, many_edges = (g.pieces[0].num_edges + g.pieces[0].num_slices for _, g in drawn)
    threads, factor = 0.0, 1.0
    if device.type == "cpu" and get_cpu_threads() > 1:
        # The part that does not grow with the edges.
        growth = many_edges / few_edges
        threads = min(max(0.0, (growth * plain - many) / (growth - 1)), 0.75 * min(*seconds, plain))
        factor = max(1.0, alone / (plain - threads))
    *entries, masked = ((s - threads) / count for s, count in zip(seconds, counts, strict=True))
    table = level([entries[row : row + len(WIDTHS)] for row in range(0, len(entries), len(WIDTHS))])
    test = max(0.0, masked - (plain - threads) / few_edges) / 8
    return tuple(map(tuple, table)), test, factor, threads


def _time_numbers(footprint: int, device: torch.device) -> tuple[int, float]:
    """Return the numbers that the nodes of 4 snapshots have, 8 each and `footprint` bytes in all, and seconds of a call
    that has hardly an edge.
    """
    num_nodes = footprint // 128
    ones = torch.ones(num_nodes, device=device)
    factors = [Factors(torch.zeros(1, dtype=torch.int64, device=device), None, ones, ones, ones)] * 4
    rows = [torch.zeros(num_nodes, 8, device=device)] * 4
    work = partial(run_group, rows, build_group(factors, num_nodes))
    return 32 * num_nodes, _time(work, device) if device.type == "cpu" else _time_behind(work, device, 4)


def run_group(features: Sequence[Tensor], matrices: SnapshotMatrices) -> Tensor:
    """Do a plan's single aggregation of one group of several: rows `[S, N, F]` of features `[N, F]` each."""
    packed = torch.stack([*features[: matrices.num_snapshots]], 1)
    out = aggregate_snapshots(packed, matrices.to(packed.device, non_blocking=True))
    return out.transpose(0, 1).contiguous()


def _run_alone(run: Callable[[], Any]) -> None:
    before = set_cpu_threads(1)
    try:
        run()
    finally:
        set_cpu_threads(before)


def _empty(group: SnapshotMatrices) -> SnapshotMatrices:
    """Return a group of as many nodes and snapshots with a single edge."""
    piece = group.pieces[0]
    presence = None if piece.presence is None else piece.presence[:1]
    only = slice_keys(torch.zeros(1, dtype=torch.int64, device=group.device), piece.num_rows, None, presence,
                      piece.num_snapshots)  # fmt: skip
    return replace(group, pieces=(only,))


def _subtract(runs: Sequence[Callable[[], Any]], rest: Sequence[Callable[[], Any]],
              device: torch.device) -> list[float]:  # fmt: skip
    """Return seconds of each run minus its rest; at least a quarter of them, because other work of the machine may have
    slowed only the rest.
    """
    works = [*runs, *rest]
    least = [math.inf] * len(works)
    # Other work comes and goes, so each is measured repeatedly. On a CPU all take turns, so that none finds its data of
    # a moment ago in a cache; groups of a sequence, each aggregated once, do not either.
    measure, rounds = (_time, 3) if device.type == "cuda" else (time_call, 10)
    for _ in range(rounds):
        least = [min(known, measure(work, device)) for known, work in zip(least, works, strict=True)]
    return [max(a - b, a / 4) for a, b in zip(least[: len(runs)], least[len(runs) :], strict=True)]


def level(table: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the table so that no entry is more than one below it, to the right of it, or both.

    Wider rows, and more bytes of them, take no less: a larger entry was measured beside other work.
    """
    out = [[*row] for row in table]
    for row in reversed(range(len(out))):
        for column in reversed(range(len(out[row]))):
            below = out[row + 1][column] if row + 1 < len(out) else math.inf
            right = out[row][column + 1] if column + 1 < len(out[row]) else math.inf
            out[row][column] = min(out[row][column], below, right)
    return out


def _draw(width: int, footprint: int, having: int, growth: float,
          device: torch.device) -> tuple[Tensor, SnapshotMatrices]:  # fmt: skip
    """Draw rows of at most `footprint` bytes in all, and a random graph of them; of `growth` times as many edges.

    So many of eight snapshots have each edge; 0 for a single snapshot.
    """
    num_nodes = min(_NODES[device.type], footprint // (4 * width))
    ten_each = min(10 * num_nodes, _MANY[device.type])
    least = max(_EDGES[device.type], _PRODUCTS[device.type] // width, ten_each)
    num_edges = min(int(growth * least), num_nodes * num_nodes // 2)
    keys = _draw_keys(num_nodes, num_edges, device)
    presence = None
    if having:
        # A byte whose set bits rotate from edge to edge.
        bits, turn = (1 << having) - 1, torch.arange(keys.numel(), device=device) % 8
        presence = ((bits << turn | bits >> (8 - turn)) & 255).to(torch.uint8)
    size = 8 if having else 1
    piece = slice_keys(keys, num_nodes, None, presence, size)
    x = torch.zeros(num_nodes, size, width // size, device=device)
    return x, SnapshotMatrices((piece,), None, None, None, num_nodes, size)


def _draw_keys(num_nodes: int, num_edges: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draw target * N + source of random edges, ascending and unique. On a GPU few nodes have many edges, so that sums
    of slices wait for each other and rows of CSR differ.
    """
    return _draw_edges(num_nodes, num_edges, device, seed).unique()


def _draw_edges(num_nodes: int, num_edges: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draw target * N + source of random edges, in no order."""
    generator = torch.Generator(device).manual_seed(seed)
    if device.type == "cpu":
        return torch.randint(num_nodes * num_nodes, (num_edges,), generator=generator, device="cpu")
    drawn = torch.rand(2, num_edges, generator=generator, device=device, dtype=torch.float64).square_()
    target, source = (drawn * num_nodes).long().clamp_(max=num_nodes - 1)
    # Neighboring numbers are unrelated.
    target, source = (torch.randperm(num_nodes, generator=generator, device=device)[i] for i in (target, source))
    return target * num_nodes + source


def _time(work: Callable[[], Any], device: torch.device) -> float:
    """Return the least of a few times, of which the first may include a compilation."""
    times = [time_call(work, device) for _ in range(2)]
    # Short ones more often, because other work of the machine affects most of them.
    while len(times) < 9 and sum(times[1:]) < 0.02:
        times.append(time_call(work, device))
    return min(times)


def _time_in_turn(work: Callable[[], Any], device: torch.device, count: int = 16) -> float:
    """Return seconds of one of several that are begun without waiting for each: the host's, or the device's if more.

    The median, because other work of the host occurs in every epoch.
    """

    def run_all() -> None:
        for _ in range(count):
            work()

    run_all()
    return statistics.median(time_call(run_all, device) for _ in range(9)) / count


def _time_behind(work: Callable[[], Any], device: torch.device, count: int = 8) -> float:
    """Return seconds of one of several that a GPU has queued while it was busy, so that none waits for the host."""
    other = torch.empty(_BUSY, dtype=torch.uint8, device=device)
    least = math.inf
    with torch.cuda.device(device):
        for _ in range(5):
            for _ in range(_FILLS):
                other.zero_()
            least = min(least, time_on_stream(work, count))
    return least
