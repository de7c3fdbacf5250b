"""Speeds of a device at aggregating edges and rows, and at small aggregations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyg_direct.ops.snapshots.aggregate import SMALL

# Numbers of a row, and numbers read under a mask by slices and over CSR, for which seconds are known.
WIDTHS = (1, 4, 16, 64, 256, 1024)
SCANNED, SCANNED_CSR = (16, 64), (16, 64, 256, 1024)
# Number of eight snapshots that lack an edge that is read under a mask.
LACKING = (1, 7)
# Numbers of a snapshot for which eight snapshots of a drawn sequence were aggregated in groups of every size and form.
# Sizes are 1, 2, 4 and 8 for "mask", and 2, 4 and 8 for "split". Then the modes of their weights.
TRIED = (2, 8, 32, 64, 128)
TRIED_VALUES = ("ones", "shared", "stacked")
# Share of all edges that some snapshot lacks, from which on their neighbors in a slice wait for nearly all of them.
_WAITING = 1 / 64
# Share of the host's time that is added if a GPU works in parallel. The host has other work at times, and is then
# slower than measured. Of 72 cells on an H200, in two runs, 0.94 and 0.93 came within 5 % of the best; 0.89 and 0.90
# without it.
_HIDDEN = 0.2
# Bytes of the rows that edges are read from, for which speeds are known. They fit the nearest caches, the next ones, a
# part of these, or none.
FOOTPRINTS = {"cpu": (2**17, 2**20, 2**24), "cuda": (2**20, 2**24, 2**26, 2**28)}


@dataclass(frozen=True)
class Speeds:
    """Speeds of a device.

    Attributes:
        seconds_of_edge: Seconds of an edge whose row has 1, 4, 16, 64, 256 and 1024 numbers, and of the row that a
            slice is added to; for rows of so many bytes in all as in `footprints`.
        test_seconds: For the test whether a snapshot has an edge.
        call_seconds: For an aggregation of a single edge; on a GPU for one of many that are queued without a wait, as
            in a sequence.
        launch_seconds: For a second structure in one aggregation.
        floor_seconds: For an aggregation of a single edge on a GPU that need not wait for the host.
        floor_more_seconds: For a second structure there.
        bytes_per_second: From host memory to the device; 0 if both are one, or if structures are made on the device.
        few_factor: Factor of the time of an edge if there is so little work that one CPU thread does it.
        footprints: Bytes, ascending.
        send_seconds: For sending the structure of a single edge.
        send_more_seconds: For sending a second structure of a single edge.
        threads_seconds: For starting all threads of a CPU on a structure.
        seconds_of_number: For a number of the features, whatever the edges: moved beside the numbers of other
            snapshots, scaled, and moved back; for sizes as in `footprints`.
        is_queued: True if the device works while the host queues the next work.
        again_seconds: For a number of the results to which a second structure adds, beyond the time of its edges.
        scan_seconds: For an edge that seven of eight snapshots have, and for one that one has, beyond the time of its
            row. The union is read under a mask, slice by slice, at 16 and 64 numbers of all snapshots.
        scan_csr_seconds: For such edges if the union is read over CSR; at 16, 64, 256 and 1024 numbers.
        convert_seconds: For making CSR of a structure that was sent.
        csr_seconds: Host time of a sum over CSR, beyond the time of slices.
        factors: Factor of the time of whole groups over the sum of all these parts. It is given without weights, with
            weights of edges, and with weights of edges in snapshots. Each has a row for each size and form, at 2, 8,
            32, 64 and 128 numbers of a snapshot. Empty if none were tried.
    """

    seconds_of_edge: tuple[tuple[float, ...], ...]
    test_seconds: float
    call_seconds: float
    launch_seconds: float
    bytes_per_second: float
    few_factor: float = 1.0
    footprints: tuple[int, ...] = FOOTPRINTS["cpu"]
    send_seconds: float = 0.0
    send_more_seconds: float = 0.0
    threads_seconds: float = 0.0
    seconds_of_number: tuple[float, ...] = (0.0, 0.0, 0.0)
    is_queued: bool = False
    again_seconds: float = 0.0
    scan_seconds: tuple[tuple[float, ...], ...] = ()
    scan_csr_seconds: tuple[tuple[float, ...], ...] = ()
    convert_seconds: float = 0.0
    floor_seconds: float = 0.0
    floor_more_seconds: float = 0.0
    csr_seconds: float = 0.0
    factors: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def together(self, host: float, device: float) -> float:
        """Return the seconds that one group of a sequence adds, from the times of the host and of the device."""
        return max(host, device) + _HIDDEN * host if self.is_queued else host + device

    def add_up(self, num_edges: int, width: float, footprint: int) -> float:
        """Return the seconds of so many edges in one structure."""
        if num_edges * width < SMALL:
            return num_edges * self.per_edge(width, footprint) * self.few_factor
        return num_edges * self.per_edge(width, footprint) + self.threads_seconds

    def per_edge(self, width: float, footprint: int = 0) -> float:
        """Return the seconds of an edge with `width` numbers from rows of so many bytes; interpolated between measured
        ones.
        """
        width = max(1.0, width)
        across = _interpolate(
            [_interpolate(known, WIDTHS, width) for known in self.seconds_of_edge], self.footprints, footprint
        )
        return across * max(1.0, width / WIDTHS[-1])

    def per_number(self, footprint: int) -> float:
        """Return the seconds of a number of the features, of so many bytes in all."""
        if min(self.seconds_of_number) <= 0:
            return max(0.0, *self.seconds_of_number)
        return _interpolate(self.seconds_of_number, self.footprints, footprint)

    def scan(self, width: int, share: float, is_csr: bool = False) -> float:
        """Return the seconds of an edge for the numbers of snapshots that lack it; a `share` of them has it."""
        tables, places = (self.scan_csr_seconds, SCANNED_CSR) if is_csr else (self.scan_seconds, SCANNED)
        if not tables:
            return 0.0
        few, most = (_interpolate(known, places, width) for known in tables)
        # Rows wider than any measured take longer in proportion, and narrower ones less.
        scale = max(1.0, width / places[-1]) * min(1.0, width / places[0])
        lacking = max(0.0, 1 - share)
        low, high = (count / 8 for count in LACKING)
        across = few + (most - few) * min(1.0, max(0.0, lacking - low) / (high - low))
        return scale * across * min(1.0, lacking / _WAITING)

    def factor(self, form: str, size: int, channels: int, values: str) -> float:
        """Return the factor of the time of groups of so many snapshots over the sum of their parts."""
        if not self.factors:
            return 1.0
        power = (size - 1).bit_length()
        row = power if form == "mask" or power == 0 else power + 3
        return _interpolate(self.factors[TRIED_VALUES.index(values)][row], TRIED, channels)


def _interpolate(values: Sequence[float], places: Sequence[float], at: float) -> float:
    """Return the value at a place between others on a logarithmic scale; beyond them, the value of the nearest end."""
    at = min(max(at, places[0]), places[-1])
    high = next(number for number in range(1, len(places)) if at <= places[number])
    share = math.log(at / places[high - 1]) / math.log(places[high] / places[high - 1])
    return math.exp((1 - share) * math.log(values[high - 1]) + share * math.log(values[high]))
