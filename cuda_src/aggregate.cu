// Sums of table rows in 16-byte pieces over the edges of a target, which Numba cannot express.
//
// Called from pyg_direct/kernels/aggregate.py. Functions follow Numba's calling convention: the first parameter is
// the place for a result, and the return value 0 means success.

typedef unsigned long long u64;

// Kinds of items, as in pyg_direct/ops/aggregate.py.
struct Float32 { static const int items = 4; };
struct Float16 { static const int items = 8; };
struct Bfloat16 { static const int items = 8; };

__device__ __forceinline__ void unpack(Float32, uint4 raw, float *value)
{
    value[0] = __uint_as_float(raw.x), value[1] = __uint_as_float(raw.y);
    value[2] = __uint_as_float(raw.z), value[3] = __uint_as_float(raw.w);
}

__device__ __forceinline__ float widen(Float16, unsigned bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

__device__ __forceinline__ float widen(Bfloat16, unsigned bits) { return __uint_as_float(bits << 16); }

template <class Kind>
__device__ __forceinline__ void unpack(Kind kind, uint4 raw, float *value)
{
    const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[2 * i] = widen(kind, word[i] & 0xffff);
        value[2 * i + 1] = widen(kind, word[i] >> 16);
    }
}

__device__ __forceinline__ unsigned narrow(Float16, float value)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// To the nearest, ties to even; what is not a number stays so.
__device__ __forceinline__ unsigned narrow(Bfloat16, float value)
{
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <class Kind>
__device__ __forceinline__ void store(Kind kind, u64 to, int piece, const float *value)
{
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = narrow(kind, value[2 * i]) | narrow(kind, value[2 * i + 1]) << 16;
    reinterpret_cast<uint4 *>(to)[piece] = make_uint4(word[0], word[1], word[2], word[3]);
}

template <int items>
__device__ __forceinline__ void store_fp32(u64 to, int piece, const float *value)
{
    float4 *at = reinterpret_cast<float4 *>(to) + piece * (items / 4);
#pragma unroll
    for (int i = 0; i < items / 4; ++i)
        at[i] = make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
}

// Writes one piece of the sums of `count` targets in a row, one after the other. Their edges lie in a row too, so that
// ids of the next edges are asked for while rows of these are on their way. Counters are 32 bits wide, which leaves
// more registers to rows.
template <class Kind, class Index, bool WEIGHTED>
__device__ __forceinline__ void sum_run(u64 to, const uint4 *x, const Index *ends, const Index *row,
                                        const float *weight, int num_edges, int e, int last, int count, int longest,
                                        int heads, unsigned pieces, int piece, float scale, bool to_fp32)
{
    // Rows that are asked for before the first is added: as many as registers hold without a detour over memory.
    const int ROWS = (Kind::items == 4 ? 5 : 4) - (WEIGHTED ? 1 : 0);
    const u64 row_bytes = (u64)pieces * Kind::items * (to_fp32 ? 4 : 2);
    int degree = last - e, after = last;
    if (count > 1) after = (int)min((long long)ends[2], (long long)num_edges);
    if (degree > longest) e = last;
    unsigned source[ROWS];
#pragma unroll
    for (int u = 0; u < ROWS; ++u)
        if (e + u < last) source[u] = row == nullptr ? e + u : (unsigned)row[e + u];
    float total[Kind::items];
#pragma unroll
    for (int i = 0; i < Kind::items; ++i) total[i] = 0.0f;
    while (true) {
        uint4 raw[ROWS];
        float share[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            raw[u] = make_uint4(0, 0, 0, 0);
            if (e + u < last) raw[u] = x[(u64)source[u] * pieces];
            share[u] = 1.0f;
            if (WEIGHTED && e + u < last) share[u] = weight[(long long)(e + u) * heads];
        }
        const bool ends_here = e + ROWS >= last;
        int next = e + ROWS, next_last = last, next_degree = degree;
        if (ends_here) {
            next = last, next_last = after, next_degree = next_last - next;
            if (next_degree > longest) next = next_last;
            if (count > 2) after = (int)min((long long)ends[3], (long long)num_edges);
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u)
            if (next + u < next_last) source[u] = row == nullptr ? next + u : (unsigned)row[next + u];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            float value[Kind::items];
            unpack(Kind(), raw[u], value);
#pragma unroll
            for (int i = 0; i < Kind::items; ++i)
                total[i] = WEIGHTED ? total[i] + share[u] * value[i] : total[i] + value[i];
        }
        if (ends_here) {
            const float factor = scale != 0.0f ? scale : 1.0f / (float)max(degree, 1);
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) total[i] *= factor;
            // Long rows are others'.
            if (degree <= longest) {
                if constexpr (Kind::items == 4) {
                    store_fp32<4>(to, piece, total);
                } else {
                    if (to_fp32) store_fp32<8>(to, piece, total);
                    else store(Kind(), to, piece, total);
                }
            }
            if (--count == 0) break;
            to += row_bytes, ++ends;
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) total[i] = 0.0f;
        }
        e = next, last = next_last, degree = next_degree;
    }
}

template <class Kind>
__device__ __forceinline__ void sum_run_of(u64 to, u64 x, u64 ends, u64 row, int index_bytes, u64 weight,
                                           int num_edges, int first, int last, int count, int longest, int heads,
                                           int pieces, int piece, float scale, bool to_fp32)
{
    const uint4 *table = reinterpret_cast<const uint4 *>(x) + piece;
    // A piece never spans two heads.
    const int head = heads == 1 ? 0 : piece / (pieces / heads);
    const float *shares = reinterpret_cast<const float *>(weight) + head;
#define SUM_RUN(Index, WEIGHTED)                                                                                    \
    sum_run<Kind, Index, WEIGHTED>(to, table, reinterpret_cast<const Index *>(ends),                                \
                                   reinterpret_cast<const Index *>(row), shares, num_edges, first, last, count,     \
                                   longest, heads, pieces, piece, scale, to_fp32)
    if (index_bytes == 8) {
        if (weight == 0) SUM_RUN(long long, false);
        else SUM_RUN(long long, true);
    } else {
        if (weight == 0) SUM_RUN(int, false);
        else SUM_RUN(int, true);
    }
#undef SUM_RUN
}

// Piece `piece` of the weighted sums of rows row[e] of `x` for `count` targets: over edges [first, last) for the first,
// whose offsets are ends[0] and ends[1], times `scale`; a `scale` of zero stands for their mean. Rows with more than
// `longest` edges are left out. Kind 0 is fp32, 1 fp16, 2 bfloat16. A null `row` stands for row[e] = e, a null `weight` for ones.
// Rows and edges are fewer than 2^31.
extern "C" __device__ int sum_run_16(int *, u64 to, u64 x, u64 ends, u64 row, int index_bytes, u64 weight,
                                     long long num_edges, long long first, long long last, int count, int longest,
                                     int heads, int pieces, int piece, float scale, int kind, int to_kind)
{
    if (kind == 0)
        sum_run_of<Float32>(to, x, ends, row, index_bytes, weight, num_edges, first, last, count, longest, heads,
                            pieces, piece, scale, true);
    else if (kind == 1)
        sum_run_of<Float16>(to, x, ends, row, index_bytes, weight, num_edges, first, last, count, longest, heads,
                            pieces, piece, scale, to_kind == 0);
    else
        sum_run_of<Bfloat16>(to, x, ends, row, index_bytes, weight, num_edges, first, last, count, longest, heads,
                             pieces, piece, scale, to_kind == 0);
    return 0;
}

// *result = number / divisor, in 32 bits where they do.
extern "C" __device__ int quotient(int *result, u64 number, int divisor)
{
    *result = number >> 32 == 0 ? (unsigned)number / (unsigned)divisor : (int)(number / (u64)divisor);
    return 0;
}

// Four neighboring numbers of a slice's sum in several snapshots, see pyg_direct/kernels/sliced.py. ONE: they belong to
// one snapshot.
template <bool ONE>
__device__ __forceinline__ void add_slice(const uint4 *z, const int *col, const float *weight, int num_weights,
                                          const unsigned char *presence, const int *snapshot, int count,
                                          unsigned pieces, float *total)
{
    const int IN_FLIGHT = 4;
    unsigned mask = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) mask |= 1u << snapshot[i];
    for (int e = 0; e < count; e += IN_FLIGHT) {
        unsigned source[IN_FLIGHT], bits[IN_FLIGHT];
        uint4 raw[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            bits[u] = 0;
            if (e + u < count) {
                source[u] = (unsigned)col[e + u];
                bits[u] = presence == nullptr ? mask : presence[e + u] & mask;
            }
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            raw[u] = make_uint4(0, 0, 0, 0);
            if (bits[u]) raw[u] = z[(u64)source[u] * pieces];
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            if (!bits[u]) continue;
            float value[4];
            unpack(Float32(), raw[u], value);
            const float *shares = weight + (long long)(e + u) * num_weights;
            if (ONE) {
                const float share = num_weights == 0 ? 1.0f : shares[num_weights > 1 ? snapshot[0] : 0];
                if (share != 0.0f) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) total[i] += share * value[i];
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float share = num_weights == 0 ? 1.0f : shares[num_weights > 1 ? snapshot[i] : 0];
                    if ((bits[u] >> snapshot[i] & 1) && share != 0.0f) total[i] += share * value[i];
                }
            }
        }
    }
}

// Adds four items to a row of fp32, whoever else adds to it.
__device__ __forceinline__ void add_4(float *to, float a, float b, float c, float d)
{
#if __CUDA_ARCH__ >= 900
    atomicAdd(reinterpret_cast<float4 *>(to), make_float4(a, b, c, d));
#else
    atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}

// Adds numbers [number, number + 4) of a slice's sum to its row `to`; `col`, `weight` and `presence` begin at the first
// of `count` edges, `scale` at the target's; a null `weight`, `presence` or `scale` stands for ones. `write` is 1 where
// others add to the same numbers, 2 where nobody does and they are zero.
extern "C" __device__ int sum_slice_16(int *, u64 to, u64 z, u64 col, u64 weight, int num_weights, u64 presence,
                                       u64 scale, int count, int items, int number, int channels, int low, int write)
{
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int snapshot[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) snapshot[i] = (number + i) / channels + low;
    const uint4 *table = reinterpret_cast<const uint4 *>(z) + number / 4;
    const int *cols = reinterpret_cast<const int *>(col);
    const float *weights = reinterpret_cast<const float *>(weight);
    const unsigned char *bits = reinterpret_cast<const unsigned char *>(presence);
    if (snapshot[0] == snapshot[3])
        add_slice<true>(table, cols, weights, num_weights, bits, snapshot, count, items / 4, total);
    else
        add_slice<false>(table, cols, weights, num_weights, bits, snapshot, count, items / 4, total);
    if (scale != 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] *= reinterpret_cast<const float *>(scale)[snapshot[i] - low];
    }
    float *at = reinterpret_cast<float *>(to) + number;
    if (write == 1) {
        add_4(at, total[0], total[1], total[2], total[3]);
    } else {
        float4 *row = reinterpret_cast<float4 *>(at);
        const float4 before = write == 2 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *row;
        *row = make_float4(before.x + total[0], before.y + total[1], before.z + total[2], before.w + total[3]);
    }
    return 0;
}

template <class Kind, class Index>
__device__ __forceinline__ void spread_span(u64 out, u64 grad, const Index *row, const float *weight, int count,
                                            int heads, unsigned pieces, float scale)
{
    float value[Kind::items];
    unpack(Kind(), *reinterpret_cast<const uint4 *>(grad), value);
#pragma unroll
    for (int i = 0; i < Kind::items; ++i) value[i] *= scale;
#pragma unroll 4
    for (int e = 0; e < count; ++e) {
        float *to = reinterpret_cast<float *>(out) + (u64)(unsigned)row[e] * pieces * Kind::items;
        const float share = weight != nullptr ? weight[(long long)e * heads] : 1.0f;
#pragma unroll
        for (int i = 0; i < Kind::items; i += 4)
            add_4(to + i, share * value[i], share * value[i + 1], share * value[i + 2], share * value[i + 3]);
    }
}

// The adjoint: adds piece `piece` of row `target` of `grad`, times weight[e] and `scale`, to rows row[e] of `out`, fp32,
// for the edges [first, last).
extern "C" __device__ int spread_span_16(int *, u64 out, u64 grad, u64 row, int index_bytes, u64 weight,
                                         long long first, long long last, long long target, int heads, int pieces,
                                         int piece, float scale, int kind)
{
    const int count = (int)(last - first), head = heads == 1 ? 0 : piece / (pieces / heads);
    const int items = kind == 0 ? 4 : 8;
    const float *shares = weight == 0 ? nullptr : reinterpret_cast<const float *>(weight) + first * heads + head;
    const u64 from = grad + ((u64)target * pieces + piece) * 16, to = out + (u64)piece * items * 4;
    const u64 ids = row + first * index_bytes;
    const int *narrow_ids = reinterpret_cast<const int *>(ids);
    const long long *wide_ids = reinterpret_cast<const long long *>(ids);
    if (kind == 0) {
        if (index_bytes == 8) spread_span<Float32>(to, from, wide_ids, shares, count, heads, pieces, scale);
        else spread_span<Float32>(to, from, narrow_ids, shares, count, heads, pieces, scale);
    } else if (kind == 1) {
        if (index_bytes == 8) spread_span<Float16>(to, from, wide_ids, shares, count, heads, pieces, scale);
        else spread_span<Float16>(to, from, narrow_ids, shares, count, heads, pieces, scale);
    } else {
        if (index_bytes == 8) spread_span<Bfloat16>(to, from, wide_ids, shares, count, heads, pieces, scale);
        else spread_span<Bfloat16>(to, from, narrow_ids, shares, count, heads, pieces, scale);
    }
    return 0;
}
