"""Reads are counted as a walk through the structure counts them, and the sweeps of PiPAD's figures are drawn."""

import json

import pytest
import torch

from benchmarks.dynamic import sweeps
from benchmarks.dynamic.kernel_reads import count_reads
from benchmarks.dynamic.snapshots import measure_overlap
from benchmarks.pictures import draw_file
from pyg_direct.bench.result_row import Machine, save_rows
from pyg_direct.datasets.dynamic_graphs import DynamicShape
from pyg_direct.dynamic.matrix_group import build_group
from pyg_direct.ops.snapshots.slice_csr import slice_keys, unite

SHAPE = DynamicShape(60, 900)


def walk(piece, size, channels, kernel, whole):
    """(requests, sectors, numbers), warp by warp."""
    bounds = piece.offsets.tolist()
    rows = [row & (2**31 - 1) for row in piece.rows.tolist()]
    owner = piece.snapshot.tolist() if piece.snapshot is not None else [0] * len(rows)
    slices = []
    for s, row in enumerate(rows):
        edges = list(range(bounds[s], bounds[s + 1]))
        if whole and s > 0 and (rows[s - 1], owner[s - 1]) == (row, owner[s]):
            first = next(n for n in reversed(range(s)) if slices[n])
            slices[first] += edges
            edges = []
        slices.append(edges)
    width = channels if piece.snapshot is not None else size * channels
    if kernel == "narrow":
        groups, each = slices, min(16, 32 // width)
    else:
        pieces = width // 4 if kernel == "wide" else width
        lanes = next(n for n in (1, 2, 4, 8, 16, 32) if n >= min(pieces, 32))
        tiles, each = (pieces + lanes - 1) // lanes, 32 // lanes
        groups = [edges for edges in slices for _ in range(tiles)] if kernel == "wide" else slices
    requests = 0
    for warp in range(0, len(groups), each):
        longest = max(map(len, groups[warp : warp + each]))
        requests += longest if kernel != "plain" else longest * tiles
    sectors = numbers = 0
    for s, edges in enumerate(slices):
        for e in edges:
            seen = range(size) if piece.snapshot is None else [owner[s]]
            if piece.presence is not None:
                seen = [t for t in seen if int(piece.presence[e]) >> t & 1]
            places = [int(piece.cols[e]) * size * channels + t * channels + f for t in seen for f in range(channels)]
            numbers += len(places)
            sectors += len({place // 8 for place in places})
    return requests, sectors, numbers


@pytest.mark.parametrize("channels", [1, 3, 4, 12])
@pytest.mark.parametrize("whole", [False, True], ids=["slices", "rows"])
@pytest.mark.parametrize("form", ["split", "mask"])
def test_reads_are_those_of_a_walk(form, whole, channels):
    group = build_group(sweeps.draw_overlapping(SHAPE, 4, 0.6), SHAPE.num_nodes, form)

    for piece in group.pieces:
        width = channels if piece.snapshot is not None else 4 * channels
        for kernel in ["plain"] + ["narrow"] * (width <= 32 and not whole) + ["wide"] * (width % 4 == 0):
            got = count_reads(piece, 4, channels, kernel, whole)

            assert got[:3] == walk(piece, 4, channels, kernel, whole), (kernel, width)
            if kernel == "wide" and whole:
                assert count_reads(piece, 4, channels, "rows") == got, width
            assert got.numbers <= got.places == got.requests * (128 if kernel == "wide" else 32)


def test_slices_bound_what_a_warp_waits_for():
    # Four rows of 4 numbers, one of which has 96 edges in three slices, the others one edge each.
    keys = torch.cat([torch.arange(96), torch.tensor([100, 200, 300])])
    piece = slice_keys(keys, 100)

    sliced, rows = (count_reads(piece, 1, 4, "wide", whole) for whole in (False, True))

    # A thread for each slice, all six of them in one warp; sources of neighboring rows share a sector.
    assert (sliced.requests, rows.requests) == (32, 96)
    assert sliced.sectors == rows.sectors == 99
    assert sliced.numbers == 4 * 99


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_snapshots_share_what_they_are_asked_to(rate):
    factors = sweeps.draw_overlapping(DynamicShape(2_000, 5_000), 4, rate)

    assert measure_overlap(unite([f.keys for f in factors])).overlap_rate == pytest.approx(rate, abs=0.05)


def test_figures_are_drawn(tmp_path):
    sweeps.check_forms(SHAPE)
    rows = [*sweeps.measure_overlap_sweep(SHAPE, "tiny", (0.5, 1.0), (2,), (4,)),
            *sweeps.measure_reads(SHAPE, "tiny", widths=(4, 8)),
            *sweeps.measure_slices({"tiny": SHAPE}, widths=(4, 8))]  # fmt: skip
    save_rows(tmp_path / "sweeps_cpu.json", rows, Machine())

    pictures = draw_file(tmp_path / "sweeps_cpu.json")

    assert {path.stem.removeprefix("sweeps_cpu_") for path in pictures} == {
        "fig_9_width_4", "fig_11_tiny_requests_an_edge", "fig_11_tiny_sectors_an_edge", "fig_11_tiny_threads_at_work",
        "fig_12"}  # fmt: skip
    kept = json.loads((tmp_path / "sweeps_cpu.json").read_text())
    assert len(kept) == len(rows)
    at_once = {r["at"]: r["p50"] for r in kept if r["curve"].endswith("sectors an edge") and r["metric"] == "mask, S=4"}
    apart = {r["at"]: r["p50"] for r in kept if r["curve"].endswith("sectors an edge") and r["metric"] == "one by one"}
    # Rows of 16 bytes fill half a sector; those of four snapshots side by side fill two.
    assert at_once[4] < apart[4] == 1
