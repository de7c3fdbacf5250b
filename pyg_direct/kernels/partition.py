"""Loops of partitioning: items grouped by bucket, and communities found in one pass over a stream of edges."""

from __future__ import annotations

from pyg_direct.kernels.jit import body, cpu_kernel, prange


@cpu_kernel
def group_buckets_cpu(buckets, counts, order):
    """Positions of items, bucket after bucket, in the order given within each; counts `[chunks, B]` starts as zeros."""
    chunks, num_buckets = counts.shape
    share = (buckets.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        for i in range(c * share, min((c + 1) * share, buckets.shape[0])):
            counts[c, buckets[i]] += 1
    # Each count becomes the place of its first item.
    running = 0
    for b in range(num_buckets):
        for c in range(chunks):
            count = counts[c, b]
            counts[c, b] = running
            running += count
    for c in prange(chunks):
        for i in range(c * share, min((c + 1) * share, buckets.shape[0])):
            at = counts[c, buckets[i]]
            counts[c, buckets[i]] = at + 1
            order[at] = i


@body
def join_ends(a, b, degree, community, volume, largest):
    """Count an edge; the end in the smaller community joins the larger one, unless one has more than `largest`."""
    degree[a] += 1
    degree[b] += 1
    own, other = community[a], community[b]
    volume[own] += 1
    volume[other] += 1
    if own == other or volume[own] > largest or volume[other] > largest:
        return
    if volume[own] <= volume[other]:
        volume[other] += degree[a]
        volume[own] -= degree[a]
        community[a] = other
    else:
        volume[own] += degree[b]
        volume[other] -= degree[b]
        community[b] = own


@cpu_kernel
def cluster_edges_cpu(sources, targets, degree, community, volume, largest):
    """One pass of streaming clustering over edges (Hollocou et al., arXiv:1703.02955, algorithm 1).

    `community` starts as the ids of the nodes, `degree` and `volume` as zeros.
    """
    # In one piece: an edge meets what those before it left.
    for _ in prange(1):
        for e in range(sources.shape[0]):
            if sources[e] != targets[e]:
                join_ends(sources[e], targets[e], degree, community, volume, largest)


@cpu_kernel
def count_ties_cpu(sources, targets, table, labels, chunks, ties):
    """ties[label of a, part of b] += 1 and likewise for the other end, over edges that join two labels."""
    for c in prange(chunks):
        for e in range(sources.shape[0]):
            a, b = sources[e], targets[e]
            if labels[a] != labels[b]:
                if labels[a] % chunks == c:
                    ties[labels[a], table[b]] += 1
                if labels[b] % chunks == c:
                    ties[labels[b], table[a]] += 1
