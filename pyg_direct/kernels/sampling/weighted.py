"""Weighted choice of neighbors, by one row.

Without replacement: the k smallest of -log(u) / weight (Efraimidis & Spirakis, Information Processing Letters 97(5),
2006), kept in a heap while the row is read once. With replacement: the inverse of the running sum of weights.

An edge of weight 0 is never chosen. Without replacement a row gives fewer picks than requested if fewer edges have a
positive weight; in both ways it gives none if no edge has. If all edges of a row are taken, weights are not read
(`is_weighted` of `worklist.py`). This is so for a fanout of -1, and without replacement for a fanout of at least the
row's (allowed) edges.

Weights are float32 or float64, from the smallest to the largest: a draw depends only on their values.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.compiler.jit import body, cpu_kernel, inlined, prange
from pyg_direct.kernels.binary_search import last_at_most
from pyg_direct.kernels.sampling.excluded_edges import first_excluded, skip_excluded
from pyg_direct.kernels.sampling.random import draw, draw_in_loop
from pyg_direct.kernels.sampling.uniform import DRAWN_TOGETHER, SHORT_ROW

_TO_UNIT = 2.0**-52
_FRACTION = 2.0**53
# More than the rounding error of a score.
MARGIN = 1.0 - 2.0**-40
# Scores outside this range grow by their logarithm, because -log(u) / weight has more powers of two than float64.
_LEAST, MOST = 2.0**-400, 2.0**400
_LOG_MOST = 400 * math.log(2)
# Weights whose scores stay inside, for any draw.
_LIGHT, _HEAVY = 2.0**-340, 2.0**340
# Sums of two stay finite.
_LARGE = 2.0**1000
# Smallest share of a row's running sum: smaller ones have lost the bits that distinguish edges.
_TRUSTED = 2.0**-24


@body
def draw_unit(key, item, slot):
    """A number in (0, 1), an odd multiple of 2**-53."""
    return (np.float64(np.int64(draw(key, item, slot) >> np.uint64(12))) + 0.5) * _TO_UNIT


draw_unit_in_loop = inlined(draw_unit, draw=draw_in_loop)


@body
def count_positive(edge_weight, start, end, enough):
    """Number of edges with a positive weight; counting stops at `enough`."""
    count = np.int64(0)
    position = start
    while position < end and count < enough:
        if edge_weight[position] > 0:
            count += 1
        position += 1
    return count


@body
def count_positive_left(edge_weight, start, size, enough, excluded, base):
    """As `count_positive`, for the `size` edges that remain from `start` on."""
    count, place = np.int64(0), np.int64(0)
    at, position = first_excluded(excluded, base + start), start
    while place < size and count < enough:
        at, position = skip_excluded(excluded, at, base, position)
        if edge_weight[position] > 0:
            count += 1
        position += 1
        place += 1
    return count


@body
def sift_down(scores, picks, at, size, score, pick):
    """Put (score, pick) at the root of the heap at scores[at:at + size], largest first, and sift it down."""
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        if child + 1 < size and scores[at + child + 1] > scores[at + child]:
            child += 1
        if scores[at + child] <= score:
            break
        scores[at + hole] = scores[at + child]
        picks[at + hole] = picks[at + child]
        hole = child
    scores[at + hole] = score
    picks[at + hole] = pick


@body
def sift_up(scores, picks, at, hole, score, pick):
    """Put (score, pick) at the end of the heap, position `hole`, and sift it up."""
    while hole > 0 and scores[at + ((hole - 1) >> 1)] < score:
        parent = (hole - 1) >> 1
        scores[at + hole] = scores[at + parent]
        picks[at + hole] = picks[at + parent]
        hole = parent
    scores[at + hole] = score
    picks[at + hole] = pick


@body
def sort_heap(scores, picks, at, count):
    """Sort a heap, smallest first: the largest goes last, and the rest is a heap again."""
    for size in range(count - 1, 0, -1):
        score, pick = scores[at + size], picks[at + size]
        scores[at + size], picks[at + size] = scores[at], picks[at]
        sift_down(scores, picks, at, size, score, pick)


@body
def score_of_extreme(unit, weight):
    """As `score_of_unit`, for any float64 weight: scores outside [_LEAST, MOST] are mapped outside in order."""
    logarithm = math.log(-math.log(unit)) - math.log(weight)
    if logarithm > _LOG_MOST:
        return MOST * (1.0 + (logarithm - _LOG_MOST))
    if logarithm < -_LOG_MOST:
        return _LEAST / (1.0 - (logarithm + _LOG_MOST))
    return -math.log(unit) / weight


@body
def score_of_unit(unit, weight):
    """-log(uniform) / weight, or a number in the same order; the edges with the smallest are picked."""
    wide = np.float64(weight)
    if wide < _LIGHT or wide > _HEAVY:
        return score_of_extreme(unit, wide)
    return -math.log(unit) / wide


@body
def score_of(key, row, place, weight):
    """The score of an edge at a position of its row."""
    return score_of_unit(draw_unit(key, row, place), weight)


@body
def order_of(score):
    """A positive integer below 2**62 in the order of the scores: exponent, then fraction."""
    fraction, exponent = math.frexp(score)
    return ((np.int64(exponent) + 512) << np.int64(52)) + np.int64((fraction - 0.5) * _FRACTION)


@body
def pick_lightest(key, row, start, size, count, edge_weight, excluded, base, to_pick, scores, picks, at):
    """Write to_pick + position of the `count` edges with the smallest scores to picks[at:], smallest first."""
    filled = 0
    skipped, position = first_excluded(excluded, base + start), start
    for place in range(size):
        skipped, position = skip_excluded(excluded, skipped, base, position)
        weight = np.float64(edge_weight[position])
        if weight > 0:
            score = score_of(key, row, place, weight)
            if filled < count:
                sift_up(scores, picks, at, filled, score, to_pick + place)
                filled += 1
            elif score < scores[at]:
                sift_down(scores, picks, at, count, score, to_pick + place)
        position += 1
    sort_heap(scores, picks, at, count)


@body
def pick_lightest_in_loop(key, row, start, size, count, edge_weight, base, units, scores, picks, at):
    """As `pick_lightest`, for a whole row, with vector instructions for a CPU's draws, and without most logarithms.

    `units` has room for SHORT_ROW.
    """
    filled = 0
    # The largest of the heap, which is not in proportion to weights beyond MOST.
    limit = np.inf
    for first in range(0, size, SHORT_ROW):
        num_places = min(SHORT_ROW, size - first)
        for i in range((num_places + DRAWN_TOGETHER - 1) // DRAWN_TOGETHER * DRAWN_TOGETHER):
            units[i] = draw_unit_in_loop(key, row, first + i)
        for i in range(num_places):
            place = first + i
            weight = np.float64(edge_weight[start + place])
            if weight > 0:
                if filled < count:
                    sift_up(scores, picks, at, filled, score_of_unit(units[i], weight), base + place)
                    filled += 1
                    limit = scores[at] if scores[at] < MOST else np.inf
                # -log(u) is at least 1 - u.
                elif (1.0 - units[i]) * MARGIN < limit * weight:
                    score = score_of_unit(units[i], weight)
                    if score < scores[at]:
                        sift_down(scores, picks, at, count, score, base + place)
                        limit = scores[at] if scores[at] < MOST else np.inf
    sort_heap(scores, picks, at, count)


@body
def pick_by_scan(key, row, start, size, slot, edge_weight):
    """As `pick_by_sum`, with sums that are computed again, relative to the largest weight."""
    largest = np.float64(0.0)
    for place in range(size):
        largest = max(largest, np.float64(edge_weight[start + place]))
    exponent = math.frexp(largest)[1]
    total = np.float64(0.0)
    for place in range(size):
        total += math.ldexp(np.float64(edge_weight[start + place]), -exponent)
    wanted = draw_unit(key, row, slot) * total
    running = np.float64(0.0)
    pick = np.int64(0)
    for place in range(size):
        weight = math.ldexp(np.float64(edge_weight[start + place]), -exponent)
        if weight > 0 and running <= wanted:
            pick = np.int64(place)
        running += weight
    return pick


@body
def pick_by_sum(key, row, start, size, slot, edge_weight, weight_before):
    """Position of the edge that slot `slot` draws with replacement; `weight_before` sums its row up to each edge.

    The row has no excluded edges.
    """
    first, final = weight_before[start], start + size - 1
    before_final, weight = weight_before[final], np.float64(edge_weight[final])
    # Sums may overflow here.
    if not (before_final < _LARGE and weight < _LARGE):
        return pick_by_scan(key, row, start, size, slot, edge_weight)
    reach = before_final + weight - first
    # The sums are too small for fractions, or the sums before this part are too large for its own.
    if reach < _LEAST or reach < (before_final + weight) * _TRUSTED:
        return pick_by_scan(key, row, start, size, slot, edge_weight)
    wanted = first + draw_unit(key, row, slot) * reach
    low = last_at_most(weight_before, start, start + size, wanted)
    # Only rounding leads to an edge without weight.
    while edge_weight[low] <= 0 and low > start:
        low -= 1
    return low - start


@body
def pick_by_sum_of_left(key, row, start, size, slot, edge_weight, weight_before, excluded, first, base):
    """As `pick_by_sum`, for a row with excluded edges, from number `first` on: the position among the remaining
    edges.
    """
    end, at, gone, before = start + size, first, 0.0, weight_before[start]
    while at < excluded.shape[0] and excluded[at] < base + end:
        gone += np.float64(edge_weight[excluded[at] - base])
        at += 1
        end += 1
    reach = weight_before[end - 1] + np.float64(edge_weight[end - 1]) - before - gone
    wanted = before + draw_unit(key, row, slot) * reach
    # The gap between two excluded edges that contains the draw.
    low, high, at = start, end, first
    while at < excluded.shape[0] and excluded[at] < base + end:
        position = excluded[at] - base
        if position > low and weight_before[position] > wanted:
            high = position
            break
        wanted += np.float64(edge_weight[position])
        low = position + 1
        at += 1
    low = last_at_most(weight_before, low, high, wanted)
    # Only rounding leads to an edge without weight; the nearest edge before it has some, or otherwise one after it.
    at = first_excluded(excluded, base + low)
    step = -1
    while edge_weight[low] <= 0 or (at < excluded.shape[0] and excluded[at] == base + low):
        if low == start:
            step = 1
        low += step
        at = first_excluded(excluded, base + low)
    return low - start - (at - first)


@body
def pick_with_replacement(key, row, start, size, slot, edge_weight, weight_before, excluded, base):
    """Position that a slot of a row draws."""
    first = first_excluded(excluded, base + start)
    if first == excluded.shape[0] or excluded[first] >= base + start + size:
        return pick_by_sum(key, row, start, size, slot, edge_weight, weight_before)
    return pick_by_sum_of_left(key, row, start, size, slot, edge_weight, weight_before, excluded, first, base)


@body
def pick_weighted_row(key, row, start, size, count, replace, edge_weight, weight_before, excluded, base, to_pick,
                      scores, picks, at):  # fmt: skip
    """Write to_pick + position of the `count` edges that a row picks to picks[at:]."""
    if replace:
        for slot in range(count):
            picks[at + slot] = to_pick + pick_with_replacement(key, row, start, size, slot, edge_weight, weight_before,
                                                               excluded, base)  # fmt: skip
    else:
        pick_lightest(key, row, start, size, count, edge_weight, excluded, base, to_pick, scores, picks, at)


@cpu_kernel
def sum_weights_cpu(indptr, edge_weight, weight_before):
    """weight_before[p] = sum of the weights before position p in its row."""
    for row in prange(indptr.shape[0] - 1):
        running = 0.0
        for position in range(indptr[row], indptr[row + 1]):
            weight_before[position] = running
            running += np.float64(edge_weight[position])
