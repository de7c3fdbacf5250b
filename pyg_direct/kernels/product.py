"""Products of many rows with small matrices, each matrix read once by a block for all of its rows (PiPAD, section 4.3).

out[b, r] = bias + x[b, r] W[b], and the adjoint for W: sums over r of the outer products of x[b, r] and grad[b, r]. A
thread keeps a tile of 4 times 4 products in registers, so that what it reads from shared memory serves four of them. Of
the numbers of a row it has every q-th, so that neighboring threads read and write neighboring numbers.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import THREADS, body, cuda, gpu_kernel

# Numbers of shared memory for rows, and for a matrix, or for the rows of a second table.
STAGED = 4096
TILE = 4


@body
def quarter(count):
    """Threads that have a row's numbers, four each, the last ones perhaps fewer."""
    return (count + 3) // 4


def padded_width(count: int) -> int:
    """`padded` of the host."""
    return 4 * -(-count // 4) + 1


@body
def padded(count):
    """Numbers between the beginnings of rows in shared memory: odd, so that four rows apart are in other banks."""
    return 4 * quarter(count) + 1


@gpu_kernel("f4[] f4[] f4[] i8 i4 i4 i4 i4 i4 f4[]")
def multiply_rows_gpu(x, weight, bias, num_rows, depth, width, is_turned, tile, blocks_each, out):
    """`x` [B, R, depth], `weight` [B, depth, width], or with `is_turned` [B, width, depth], `out` [B, R, width].

    `blocks_each` blocks share out the tiles of `tile` rows, a multiple of 4, of a matrix. `bias` may be empty.
    """
    staged = cuda.shared.array(STAGED, np.float32)
    matrix = cuda.shared.array(STAGED, np.float32)
    thread = np.int32(cuda.threadIdx.x)
    batch = np.int64(cuda.blockIdx.x) // blocks_each
    number = np.int64(cuda.blockIdx.x) - batch * blocks_each
    quads, stride = quarter(width), padded(depth)
    at = thread
    while at < depth * 4 * quads:
        k, n = at // (4 * quads), at % (4 * quads)
        value = np.float32(0)
        if n < width:
            place = n * depth + k if is_turned != 0 else k * width + n
            value = weight[batch * depth * width + place]
        matrix[at] = value
        at += THREADS
    first = number * tile
    while first < num_rows:
        count = np.int32(min(np.int64(tile), num_rows - first))
        cuda.syncthreads()
        begin = (batch * num_rows + first) * depth
        at = thread
        while at < 4 * quarter(count) * depth:
            row = at // depth
            # Rows behind the last one are zeros: what memory held may be no numbers.
            staged[row * stride + at - row * depth] = x[begin + at] if row < count else np.float32(0)
            at += THREADS
        cuda.syncthreads()
        item = thread
        while item < quarter(count) * quads:
            group = item // quads
            quad = item - group * quads
            s00, s01, s02, s03 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            s10, s11, s12, s13 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            s20, s21, s22, s23 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            s30, s31, s32, s33 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            a, b = 4 * group * stride, quad
            for _ in range(depth):
                x0, x1, x2, x3 = staged[a], staged[a + stride], staged[a + 2 * stride], staged[a + 3 * stride]
                w0, w1, w2, w3 = matrix[b], matrix[b + quads], matrix[b + 2 * quads], matrix[b + 3 * quads]
                s00, s01, s02, s03 = s00 + x0 * w0, s01 + x0 * w1, s02 + x0 * w2, s03 + x0 * w3
                s10, s11, s12, s13 = s10 + x1 * w0, s11 + x1 * w1, s12 + x1 * w2, s13 + x1 * w3
                s20, s21, s22, s23 = s20 + x2 * w0, s21 + x2 * w1, s22 + x2 * w2, s23 + x2 * w3
                s30, s31, s32, s33 = s30 + x3 * w0, s31 + x3 * w1, s32 + x3 * w2, s33 + x3 * w3
                a += 1
                b += 4 * quads
            to = (batch * num_rows + first + 4 * group) * width + quad
            left = count - 4 * group
            write_row(out, to, s00, s01, s02, s03, bias, quad, quads, width, left > 0)
            write_row(out, to + width, s10, s11, s12, s13, bias, quad, quads, width, left > 1)
            write_row(out, to + 2 * width, s20, s21, s22, s23, bias, quad, quads, width, left > 2)
            write_row(out, to + 3 * width, s30, s31, s32, s33, bias, quad, quads, width, left > 3)
            item += THREADS
        first += np.int64(blocks_each) * tile


@body
def write_row(out, to, s0, s1, s2, s3, bias, quad, quads, width, is_row):
    """Write what a thread has of a row."""
    if is_row:
        write_number(out, to, s0, bias, quad, width)
        write_number(out, to + quads, s1, bias, quad + quads, width)
        write_number(out, to + 2 * quads, s2, bias, quad + 2 * quads, width)
        write_number(out, to + 3 * quads, s3, bias, quad + 3 * quads, width)


@body
def write_number(out, to, value, bias, number, width):
    """Write one number of a row, if a row has so many."""
    if number < width:
        out[to] = value + bias[number] if bias.shape[0] > 0 else value


@body
def count_teams(pairs):
    """Groups of threads of a block that each have all of `pairs` tiles of products."""
    return max(np.int32(1), np.int32(THREADS // pairs))


@gpu_kernel("f4[] f4[] f4[] i8 i4 i4 i4 i4 i4 f4[]")
def multiply_columns_gpu(x, grad, none, num_rows, depth, width, has_ones, tile, blocks_each, out):
    """Sums of the outer products of rows of `x` [B, R, depth] and `grad` [B, R, width], in parts that are to be added:
    `out` [B, blocks_each, teams, depth + has_ones, width].

    With `has_ones` rows of `x` end with a one more. `none` is empty.
    """
    staged = cuda.shared.array(STAGED, np.float32)
    others = cuda.shared.array(STAGED, np.float32)
    thread = np.int32(cuda.threadIdx.x)
    batch = np.int64(cuda.blockIdx.x) // blocks_each
    number = np.int64(cuda.blockIdx.x) - batch * blocks_each
    deep = depth + has_ones
    quads_deep, quads, stride, other_stride = quarter(deep), quarter(width), padded(deep), padded(width)
    pairs = quads_deep * quads
    # Threads that have the same products share the rows out.
    teams = count_teams(pairs)
    part = np.int32(0)
    while part < pairs:
        pair = part + thread % pairs if teams > 1 else part + thread
        team = thread // pairs if teams > 1 else np.int32(0)
        is_busy = pair < pairs and team < teams
        deep_quad = pair // quads
        quad = pair - deep_quad * quads
        s00, s01, s02, s03 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        s10, s11, s12, s13 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        s20, s21, s22, s23 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        s30, s31, s32, s33 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        first = number * tile
        while first < num_rows:
            count = np.int32(min(np.int64(tile), num_rows - first))
            cuda.syncthreads()
            begin = batch * num_rows + first
            at = thread
            while at < count * 4 * quads_deep:
                row, n = at // (4 * quads_deep), at % (4 * quads_deep)
                value = np.float32(1) if n == depth and has_ones != 0 else np.float32(0)
                if n < depth:
                    value = x[(begin + row) * depth + n]
                staged[row * stride + n] = value
                at += THREADS
            at = thread
            while at < count * 4 * quads:
                row, n = at // (4 * quads), at % (4 * quads)
                value = np.float32(0)
                if n < width:
                    value = grad[(begin + row) * width + n]
                others[row * other_stride + n] = value
                at += THREADS
            cuda.syncthreads()
            if is_busy:
                row = team
                while row < count:
                    a, b = row * stride + deep_quad, row * other_stride + quad
                    x0, x1 = staged[a], staged[a + quads_deep]
                    x2, x3 = staged[a + 2 * quads_deep], staged[a + 3 * quads_deep]
                    w0, w1, w2, w3 = others[b], others[b + quads], others[b + 2 * quads], others[b + 3 * quads]
                    s00, s01, s02, s03 = s00 + x0 * w0, s01 + x0 * w1, s02 + x0 * w2, s03 + x0 * w3
                    s10, s11, s12, s13 = s10 + x1 * w0, s11 + x1 * w1, s12 + x1 * w2, s13 + x1 * w3
                    s20, s21, s22, s23 = s20 + x2 * w0, s21 + x2 * w1, s22 + x2 * w2, s23 + x2 * w3
                    s30, s31, s32, s33 = s30 + x3 * w0, s31 + x3 * w1, s32 + x3 * w2, s33 + x3 * w3
                    row += teams
            first += np.int64(blocks_each) * tile
        if is_busy:
            to = ((batch * blocks_each + number) * teams + team) * deep * width + deep_quad * width + quad
            down = quads_deep * width
            write_row(out, to, s00, s01, s02, s03, none, quad, quads, width, deep_quad < deep)
            write_row(out, to + down, s10, s11, s12, s13, none, quad, quads, width, deep_quad + quads_deep < deep)
            write_row(out, to + 2 * down, s20, s21, s22, s23, none, quad, quads, width,
                      deep_quad + 2 * quads_deep < deep)  # fmt: skip
            write_row(out, to + 3 * down, s30, s31, s32, s33, none, quad, quads, width,
                      deep_quad + 3 * quads_deep < deep)  # fmt: skip
        part += np.int32(THREADS) if teams == 1 else pairs
