"""What a device takes to aggregate edges, rows and little of either, measured once and kept on disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_direct.disk import recall
from pyg_direct.dynamic.group import FORMS, build_group
from pyg_direct.dynamic.operator import Factors
from pyg_direct.kernels.jit import get_cpu_threads, set_cpu_threads
from pyg_direct.ops.sliced import slice_keys
from pyg_direct.ops.snapshots import SMALL, WIDE_ROW, SnapshotMatrices, aggregate_snapshots

_WIDTHS = (1, 4, 16, 64, 256)
_SCANNED = (16, 64, 256)
# Bytes of the rows that edges are read from: in the nearest caches, in the next ones, and beyond.
_FOOTPRINTS = {"cpu": (2**17, 2**20, 2**24), "cuda": (2**20, 2**24, 2**28)}
# Nodes at most; rows of few numbers stay below the largest of these sizes. Edges at least, and products of theirs: so
# many that all threads of a CPU take part, and that a launch is nothing beside them on a GPU. Ten a node, but no more
# than so many.
_NODES = {"cpu": 500_000, "cuda": 1_000_000}
_EDGES = {"cpu": 20_000, "cuda": 1_000_000}
_MANY = {"cpu": 200_000, "cuda": 10_000_000}
_PRODUCTS = {"cpu": SMALL, "cuda": 2**22}
# Of how they are measured.
_VERSION = {"cpu": 7, "cuda": 9}


@dataclass(frozen=True)
class Speeds:
    """What a device needs.

    Attributes:
        seconds_of_edge: Seconds of an edge whose row has 1, 4, 16, 64 and 256 numbers, and of the row that a slice is
            added to; for rows of so many bytes in all as `footprints` tells.
        test_seconds: Of asking whether a snapshot has an edge.
        call_seconds: Of an aggregation of a single edge; on a GPU of one of many that are asked for without waiting, as
            those of a sequence are.
        launch_seconds: Of a second structure in one aggregation.
        bytes_per_second: From host memory to the device; 0 where these are one, or structures are made there.
        few_factor: How much longer an edge takes where there is so little to do that one CPU thread does it.
        footprints: Bytes, ascending.
        send_seconds: Of sending what a single edge takes.
        send_more_seconds: Of sending a second structure of one.
        threads_seconds: Of letting all threads of a CPU begin with a structure.
        seconds_of_number: Of a number of the features, whatever the edges: laid beside those of other snapshots,
            scaled, and laid apart again; as `footprints` tells.
        is_queued: Whether the device works while the host asks for what follows.
        again_seconds: Of a number of the results to which a second structure adds, beyond those of its edges.
        scan_seconds: Of an edge that one of eight snapshots has, beyond those of its row, where a union is read under a
            mask; at 16, 64 and 256 numbers of all snapshots.
        convert_seconds: Of making CSR of a structure that was sent.
    """

    seconds_of_edge: tuple[tuple[float, ...], ...]
    test_seconds: float
    call_seconds: float
    launch_seconds: float
    bytes_per_second: float
    few_factor: float = 1.0
    footprints: tuple[int, ...] = _FOOTPRINTS["cpu"]
    send_seconds: float = 0.0
    send_more_seconds: float = 0.0
    threads_seconds: float = 0.0
    seconds_of_number: tuple[float, ...] = (0.0, 0.0, 0.0)
    is_queued: bool = False
    again_seconds: float = 0.0
    scan_seconds: tuple[float, ...] = ()
    convert_seconds: float = 0.0

    def together(self, host: float, device: float) -> float:
        """Seconds that one group of a sequence adds, of what the host does for it and the device."""
        return max(host, device) if self.is_queued else host + device

    def add_up(self, num_edges: int, width: float, footprint: int) -> float:
        """Seconds of so many edges in one structure."""
        if num_edges * width < SMALL:
            return num_edges * self.per_edge(width, footprint) * self.few_factor
        return num_edges * self.per_edge(width, footprint) + self.threads_seconds

    def per_edge(self, width: float, footprint: int = 0) -> float:
        """Seconds of an edge with `width` numbers from rows of so many bytes; between those measured in proportion."""
        width = max(1.0, width)
        across = _interpolate(
            [self._at_width(known, width) for known in self.seconds_of_edge], self.footprints, footprint
        )
        return across * max(1.0, width / _WIDTHS[-1])

    def per_number(self, footprint: int) -> float:
        """Seconds of a number of the features, of so many bytes in all."""
        if min(self.seconds_of_number) <= 0:
            return max(0.0, *self.seconds_of_number)
        return _interpolate(self.seconds_of_number, self.footprints, footprint)

    def scan(self, width: int, share: float) -> float:
        """Seconds of an edge for the numbers of snapshots that have it not: a `share` of them has."""
        if not self.scan_seconds or min(self.scan_seconds) <= 0:
            return max(0.0, *self.scan_seconds, 0.0)
        least, most = _SCANNED[0], _SCANNED[-1]
        across = _interpolate(self.scan_seconds, _SCANNED, width) * max(1.0, width / most) * min(1.0, width / least)
        # As measured, where an edge is in one of eight.
        return across * max(0.0, 1 - share) / (1 - 1 / 8)

    def _at_width(self, known: Sequence[float], width: float) -> float:
        return _interpolate(known, _WIDTHS, width)


def _interpolate(values: Sequence[float], places: Sequence[float], at: float) -> float:
    """The value at a place between others on a line of logarithms; that of the nearest end beyond them."""
    at = min(max(at, places[0]), places[-1])
    high = next(number for number in range(1, len(places)) if at <= places[number])
    share = math.log(at / places[high - 1]) / math.log(places[high] / places[high - 1])
    return math.exp((1 - share) * math.log(values[high - 1]) + share * math.log(values[high]))


def find_speeds(device: torch.device) -> Speeds:
    """The speeds of a device, measured at the first call on this machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"

    def is_valid(kept: Any) -> bool:
        table = kept.get("seconds_of_edge") if isinstance(kept, dict) and kept.keys() == names else None
        rows = len(_FOOTPRINTS[device.type])
        return isinstance(table, list) and [len(row) for row in table] == [len(_WIDTHS)] * rows

    names = {field.name for field in fields(Speeds)}
    kept = recall("snapshots", f"{name} {_VERSION[device.type]}", lambda: asdict(_measure(device)), is_valid)
    known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}
    return Speeds(**{**known, "seconds_of_edge": tuple(map(tuple, kept["seconds_of_edge"]))})


def _measure(device: torch.device) -> Speeds:
    table, test, few, threads = _measure_edges(device)
    ones = torch.ones(2)
    first, second = (Factors(torch.tensor([key]), None, ones, ones, ones) for key in (0, 1))
    alone, split = (build_group(f, 2) for f in ([first], [first._replace(keys=torch.arange(2)), second]))
    rows = [torch.zeros(2, 1, device=device)] * 2
    here = [partial(run_group, rows, group.to(device)) for group in (alone, split)]
    # Alone, as what its size adds is measured.
    call = _time(here[0], device)
    rounds = [[_measure_numbers(size, call, device) for size in _FOOTPRINTS[device.type]] for _ in range(3)]
    (numbers,) = level([list(map(min, zip(*rounds, strict=True)))])
    rate = send = more = again = convert = 0.0
    scans: tuple[float, ...] = ()
    measure = _time_in_turn if device.type == "cuda" else _time
    call, two = (measure(work, device) for work in here)
    if device.type == "cuda":
        sent, sent_two = (measure(partial(run_group, rows, group), device) for group in (alone, split))
        send = max(0.0, sent - call)
        more = max(0.0, sent_two - two - send)
        host = torch.zeros(1 << 24, dtype=torch.uint8)
        rate = host.numel() / _time(partial(host.to, device), device)
        convert = _measure_conversion(device)
    known = Speeds(table, test, call, max(0.0, two - call), rate, few, _FOOTPRINTS[device.type], send, more, threads,
                   tuple(numbers), device.type == "cuda", convert_seconds=convert)  # fmt: skip
    if device.type == "cuda":
        scans, again = _measure_scans(known, device), _measure_again(known, device)
    return replace(known, scan_seconds=scans, again_seconds=again)


def _measure_conversion(device: torch.device) -> float:
    """Seconds beyond a union's of a structure that was sent and is read as CSR."""
    ones = torch.ones(2)
    alike = [Factors(torch.tensor([0]), None, ones, ones, ones)] * 2
    rows = [torch.zeros(2, WIDE_ROW // 2, device=device)] * 2
    split, mask = (_time_in_turn(partial(run_group, rows, build_group(alike, 2, form)), device) for form in FORMS)
    return max(0.0, split - mask)


def _measure_scans(speeds: Speeds, device: torch.device) -> tuple[float, ...]:
    """Seconds of an edge that one of eight snapshots has, beyond those of its row, at several widths of all eight."""
    footprint = speeds.footprints[1]
    drawn = [_draw(width, footprint, True, 1, device, is_sparse=True) for width in _SCANNED]
    seconds = _subtract([partial(aggregate_snapshots, x, group) for x, group in drawn],
                        [partial(aggregate_snapshots, x, _empty(group)) for x, group in drawn], device)  # fmt: skip
    counts = [group.pieces[0].num_edges + group.pieces[0].num_slices for _, group in drawn]
    return tuple(max(0.0, s / count - speeds.per_edge(width / 8, footprint))
                 for s, count, width in zip(seconds, counts, _SCANNED, strict=True))  # fmt: skip


def _measure_again(speeds: Speeds, device: torch.device) -> float:
    """Seconds of each of 32 numbers of 4 snapshots to which edges of their own, one a node, add, beyond theirs."""
    footprint, width, size = speeds.footprints[1], 32, 4
    num_nodes = footprint // (4 * size * width)
    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randint(num_nodes * num_nodes, (count,), generator=generator, device=device).unique()

    ones = torch.ones(num_nodes, device=device)
    shared = draw(10 * num_nodes)
    own = [torch.cat([shared, draw(num_nodes)]).unique() for _ in range(size)]
    rows = [torch.zeros(num_nodes, width, device=device)] * size
    groups = [build_group([Factors(keys, None, ones, ones, ones) for keys in part], num_nodes)
              for part in (own, [shared] * size)]  # fmt: skip
    both, one = (_time(partial(run_group, rows, group), device) for group in groups)
    edges = sum(keys.numel() for keys in own) - size * shared.numel()
    numbers = num_nodes * size * width
    return max(0.0, both - one - speeds.launch_seconds - 2 * edges * speeds.per_edge(width, footprint)) / numbers


def _measure_edges(device: torch.device) -> tuple[tuple[tuple[float, ...], ...], float, float, float]:
    """Seconds of edges, of asking for them, how much longer one thread takes, and seconds until all have begun."""
    footprints = _FOOTPRINTS[device.type]
    cells = [(width, footprint, False, 1) for footprint in footprints for width in _WIDTHS]
    # Rows of 8 snapshots and 4 numbers in each, all of which each edge has, and as wide ones of one; then four times
    # as many of these.
    cells += [(32, footprints[0], True, 1), (32, footprints[0], False, 1), (32, footprints[0], False, 4)]
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
        # What does not grow with the edges.
        growth = many_edges / few_edges
        threads = min(max(0.0, (growth * plain - many) / (growth - 1)), 0.75 * min(*seconds, plain))
        factor = max(1.0, alone / (plain - threads))
    *entries, masked = ((s - threads) / count for s, count in zip(seconds, counts, strict=True))
    table = level([entries[row : row + len(_WIDTHS)] for row in range(0, len(entries), len(_WIDTHS))])
    test = max(0.0, masked - (plain - threads) / few_edges) / 8
    return tuple(map(tuple, table)), test, factor, threads


def _measure_numbers(footprint: int, call: float, device: torch.device) -> float:
    """Seconds beyond a call's of each of the 8 numbers of the nodes of 4 snapshots, `footprint` bytes in all."""
    num_nodes = min(_NODES[device.type], footprint // 128)
    ones = torch.ones(num_nodes, device=device)
    factors = [Factors(torch.zeros(1, dtype=torch.int64, device=device), None, ones, ones, ones)] * 4
    rows = [torch.zeros(num_nodes, 8, device=device)] * 4
    seconds = _time(partial(run_group, rows, build_group(factors, num_nodes)), device)
    return max(0.0, seconds - call) / (32 * num_nodes)


def run_group(features: Sequence[Tensor], matrices: SnapshotMatrices) -> Tensor:
    """What a plan does once for one group of several: rows `[S, N, F]` of features `[N, F]` each."""
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
    """A group of as many nodes and snapshots with a single edge."""
    piece = group.pieces[0]
    presence = None if piece.presence is None else piece.presence[:1]
    only = slice_keys(torch.zeros(1, dtype=torch.int64, device=group.device), piece.num_rows, None, presence,
                      piece.num_snapshots)  # fmt: skip
    return replace(group, pieces=(only,))


def _subtract(runs: Sequence[Callable[[], Any]], rest: Sequence[Callable[[], Any]],
              device: torch.device) -> list[float]:  # fmt: skip
    """Seconds of each run without those of its rest; at least a quarter of them, as other work of the machine may have
    been in the way of the rest alone.
    """
    works = [*runs, *rest]
    least = [math.inf] * len(works)
    # That work comes and goes: each is measured now and again. On a CPU all take turns, so that none finds in a cache
    # what it left there a moment ago, as groups of a sequence, each aggregated once, do not either.
    measure, rounds = (_time, 3) if device.type == "cuda" else (_run, 10)
    for _ in range(rounds):
        least = [min(known, measure(work, device)) for known, work in zip(least, works, strict=True)]
    return [max(a - b, a / 4) for a, b in zip(least[: len(runs)], least[len(runs) :], strict=True)]


def level(table: Sequence[Sequence[float]]) -> list[list[float]]:
    """The same where no entry is more than one below it, to the right of it, or both.

    Wider rows, and more bytes of them, take no less: an entry that is more was measured beside other work.
    """
    out = [[*row] for row in table]
    for row in reversed(range(len(out))):
        for column in reversed(range(len(out[row]))):
            below = out[row + 1][column] if row + 1 < len(out) else math.inf
            right = out[row][column + 1] if column + 1 < len(out[row]) else math.inf
            out[row][column] = min(out[row][column], below, right)
    return out


def _draw(width: int, footprint: int, is_masked: bool, growth: int, device: torch.device,
          is_sparse: bool = False) -> tuple[Tensor, SnapshotMatrices]:  # fmt: skip
    """Rows of at most `footprint` bytes in all, and a random graph of them; of `growth` times as many edges.

    With `is_masked` eight snapshots have them all, or with `is_sparse` one of eight each.
    """
    num_nodes = min(_NODES[device.type], footprint // (4 * width))
    ten_each = min(10 * num_nodes, _MANY[device.type])
    least = max(_EDGES[device.type], _PRODUCTS[device.type] // width, ten_each)
    num_edges = min(growth * least, num_nodes * num_nodes // 2)
    generator = torch.Generator(device).manual_seed(0)
    keys = torch.randint(num_nodes * num_nodes, (num_edges,), generator=generator, device=device).unique()
    size = 8 if is_masked else 1
    presence = torch.full_like(keys, 255, dtype=torch.uint8) if is_masked else None
    if is_sparse:
        presence = (1 << torch.arange(keys.numel(), device=device) % 8).to(torch.uint8)
    piece = slice_keys(keys, num_nodes, None, presence, size)
    x = torch.zeros(num_nodes, size, width // size, device=device)
    return x, SnapshotMatrices((piece,), None, None, None, num_nodes, size)


def _run(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the device has done some work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _time(work: Callable[[], Any], device: torch.device) -> float:
    """Least of a few times, of which the first may be one that compiles."""
    times = [_run(work, device) for _ in range(2)]
    # Short ones more often, as other work of the machine is in most of them.
    while len(times) < 9 and sum(times[1:]) < 0.02:
        times.append(_run(work, device))
    return min(times)


def _time_in_turn(work: Callable[[], Any], device: torch.device, count: int = 16) -> float:
    """Seconds of one of several that are begun without waiting for each: the host's, or the device's if more."""

    def run_all() -> None:
        for _ in range(count):
            work()

    return _time(run_all, device) / count
