// Sums and extremes of table rows in 16-byte pieces over the edges of targets, which Numba cannot express.
//
// Called from pyg_direct/kernels/aggregate/sum.py. Functions follow Numba's calling convention: the first parameter is
// the address for a result, and the return value 0 means success.

#include "items.cuh"

// Operations on the rows of a target's edges.
enum Step { SUM, WEIGHTED, LARGEST, SMALLEST };

// Initial value, which every item beats, two of 16 bits or one of 32.
__device__ __forceinline__ unsigned worst(Float32, Step step) { return step == LARGEST ? 0xff800000 : 0x7f800000; }
__device__ __forceinline__ unsigned worst(Float16, Step step) { return step == LARGEST ? 0xfc00fc00 : 0x7c007c00; }
__device__ __forceinline__ unsigned worst(Bfloat16, Step step) { return step == LARGEST ? 0xff80ff80 : 0x7f807f80; }

// As `take_larger` of pyg_direct/kernels/aggregate/max_min.py: a NaN wins.
template <Step STEP>
__device__ __forceinline__ float take_better(float best, float value)
{
    const bool is_no_better = STEP == LARGEST ? value <= best : value >= best;
    return best == best && !is_no_better ? value : best;
}

// The same for the items in a word, one of 32 bits or two of 16.
#if __CUDA_ARCH__ >= 800
#define TAKE_BETTER(Kind, TYPE)                                                                                     \
    template <Step STEP> __device__ __forceinline__ unsigned take_better(Kind, unsigned best, unsigned value)       \
    {                                                                                                               \
        if (STEP == LARGEST) asm("max.NaN." TYPE " %0, %0, %1;" : "+r"(best) : "r"(value));                         \
        else asm("min.NaN." TYPE " %0, %0, %1;" : "+r"(best) : "r"(value));                                         \
        return best;                                                                                                \
    }
TAKE_BETTER(Float16, "f16x2")
TAKE_BETTER(Bfloat16, "bf16x2")
#undef TAKE_BETTER

template <Step STEP> __device__ __forceinline__ unsigned take_better(Float32, unsigned best, unsigned value)
{
    float result;
    if (STEP == LARGEST) asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(__uint_as_float(best)), "f"(__uint_as_float(value)));
    else asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(__uint_as_float(best)), "f"(__uint_as_float(value)));
    return __float_as_uint(result);
}
#else
template <Step STEP, class Kind>
__device__ __forceinline__ unsigned take_better(Kind kind, unsigned best, unsigned value)
{
    return narrow_two(kind, take_better<STEP>(widen(kind, best & 0xffff), widen(kind, value & 0xffff)),
                      take_better<STEP>(widen(kind, best >> 16), widen(kind, value >> 16)));
}

template <Step STEP> __device__ __forceinline__ unsigned take_better(Float32, unsigned best, unsigned value)
{
    return __float_as_uint(take_better<STEP>(__uint_as_float(best), __uint_as_float(value)));
}
#endif

// Writes one piece of the results of `count` consecutive targets, one after the other. Their edges are consecutive too,
// so that ids of the next edges are requested while rows of these are in flight. Counters are 32 bits wide, which
// leaves more registers to rows.
template <class Kind, class Index, Step STEP>
__device__ __forceinline__ void reduce_run(u64 to, const uint4 *x, const Index *ends, const Index *row,
                                           const float *weight, int num_edges, int e, int last, int count, int longest,
                                           int heads, unsigned pieces, int piece, float scale, bool to_fp32)
{
    // Rows that are requested before the first is added: as many as registers hold without spilling to memory. Extremes
    // need fewer registers, so that each multiprocessor holds one block more of them.
    const int ROWS = STEP == SUM ? 5 : 4;
    const bool IS_SUM = STEP == SUM || STEP == WEIGHTED;
    const unsigned none = IS_SUM ? 0 : worst(Kind(), STEP);
    const u64 row_bytes = (u64)pieces * Kind::items * (to_fp32 ? 4 : 2);
    int degree = last - e, after = last;
    if (count > 1) after = (int)min((long long)ends[2], (long long)num_edges);
    if (degree > longest) e = last;
    unsigned source[ROWS];
#pragma unroll
    for (int u = 0; u < ROWS; ++u)
        if (e + u < last) source[u] = row == nullptr ? e + u : (unsigned)row[e + u];
    float total[Kind::items] = {};
    // Extremes stay in their stored format.
    uint4 best = make_uint4(none, none, none, none);
    while (true) {
        uint4 raw[ROWS];
        float share[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            raw[u] = make_uint4(none, none, none, none);
            if (e + u < last) raw[u] = x[(u64)source[u] * pieces];
            share[u] = 1.0f;
            if (STEP == WEIGHTED && e + u < last) share[u] = weight[(long long)(e + u) * heads];
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
            if constexpr (IS_SUM) {
                float value[Kind::items];
                unpack(Kind(), raw[u], value);
#pragma unroll
                for (int i = 0; i < Kind::items; ++i) total[i] += STEP == WEIGHTED ? share[u] * value[i] : value[i];
            } else {
                best.x = take_better<STEP>(Kind(), best.x, raw[u].x);
                best.y = take_better<STEP>(Kind(), best.y, raw[u].y);
                best.z = take_better<STEP>(Kind(), best.z, raw[u].z);
                best.w = take_better<STEP>(Kind(), best.w, raw[u].w);
            }
        }
        if (ends_here) {
            const float factor = scale != 0.0f ? scale : 1.0f / (float)max(degree, 1);
            if constexpr (!IS_SUM) unpack(Kind(), best, total);
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) {
                if constexpr (IS_SUM) total[i] *= factor;
                // The sum of two zeros is the positive one.
                else total[i] = degree == 0 ? 0.0f : total[i] + 0.0f;
            }
            // Other threads compute long rows.
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
            best = make_uint4(none, none, none, none);
        }
        e = next, last = next_last, degree = next_degree;
    }
}

#define REDUCE_RUN(Kind, Index, STEP)                                                                               \
    reduce_run<Kind, Index, STEP>(to, reinterpret_cast<const uint4 *>(x) + piece,                                   \
                                  reinterpret_cast<const Index *>(ends), reinterpret_cast<const Index *>(row),      \
                                  shares, num_edges, first, last, count, longest, heads, pieces, piece, scale,      \
                                  Kind::items == 4 || to_kind == 0)

template <class Kind>
__device__ __forceinline__ void sum_run_of(u64 to, u64 x, u64 ends, u64 row, int index_bytes, u64 weight,
                                           int num_edges, int first, int last, int count, int longest, int heads,
                                           int pieces, int piece, float scale, int to_kind)
{
    // A piece never spans two heads.
    const int head = heads == 1 ? 0 : piece / (pieces / heads);
    const float *shares = reinterpret_cast<const float *>(weight) + head;
    if (index_bytes == 8) {
        if (weight == 0) REDUCE_RUN(Kind, long long, SUM);
        else REDUCE_RUN(Kind, long long, WEIGHTED);
    } else {
        if (weight == 0) REDUCE_RUN(Kind, int, SUM);
        else REDUCE_RUN(Kind, int, WEIGHTED);
    }
}

// Piece `piece` of the weighted sums of rows row[e] of `x` for `count` targets, times `scale`; a `scale` of zero stands
// for their mean. The first target has the edges [first, last), and its offsets are ends[0] and ends[1]. Rows with more
// than `longest` edges are left out. Kind 0 is fp32, 1 fp16, 2 bfloat16. A null `row` stands for row[e] = e, a null
// `weight` for ones. Rows and edges are fewer than 2^31.
extern "C" __device__ int sum_run_16(int *, u64 to, u64 x, u64 ends, u64 row, int index_bytes, u64 weight,
                                     long long num_edges, long long first, long long last, int count, int longest,
                                     int heads, int pieces, int piece, float scale, int kind, int to_kind)
{
    if (kind == 0)
        sum_run_of<Float32>(to, x, ends, row, index_bytes, weight, num_edges, first, last, count, longest, heads,
                            pieces, piece, scale, to_kind);
    else if (kind == 1)
        sum_run_of<Float16>(to, x, ends, row, index_bytes, weight, num_edges, first, last, count, longest, heads,
                            pieces, piece, scale, to_kind);
    else
        sum_run_of<Bfloat16>(to, x, ends, row, index_bytes, weight, num_edges, first, last, count, longest, heads,
                             pieces, piece, scale, to_kind);
    return 0;
}

template <class Kind>
__device__ __forceinline__ void extreme_run_of(u64 to, u64 x, u64 ends, u64 row, int index_bytes, int num_edges,
                                               int first, int last, int count, int longest, int pieces, int piece,
                                               bool largest, int to_kind)
{
    const float *shares = nullptr;
    const int heads = 1;
    const float scale = 1.0f;
    if (index_bytes == 8) {
        if (largest) REDUCE_RUN(Kind, long long, LARGEST);
        else REDUCE_RUN(Kind, long long, SMALLEST);
    } else {
        if (largest) REDUCE_RUN(Kind, int, LARGEST);
        else REDUCE_RUN(Kind, int, SMALLEST);
    }
}
#undef REDUCE_RUN

// As `sum_run_16`, for the largest items (`sign` 1) or the smallest; zeros for a target without edges.
extern "C" __device__ int extreme_run_16(int *, u64 to, u64 x, u64 ends, u64 row, int index_bytes, long long num_edges,
                                         long long first, long long last, int count, int longest, int pieces,
                                         int piece, int sign, int kind, int to_kind)
{
    if (kind == 0)
        extreme_run_of<Float32>(to, x, ends, row, index_bytes, num_edges, first, last, count, longest, pieces, piece,
                                sign > 0, to_kind);
    else if (kind == 1)
        extreme_run_of<Float16>(to, x, ends, row, index_bytes, num_edges, first, last, count, longest, pieces, piece,
                                sign > 0, to_kind);
    else
        extreme_run_of<Bfloat16>(to, x, ends, row, index_bytes, num_edges, first, last, count, longest, pieces, piece,
                                 sign > 0, to_kind);
    return 0;
}

// Item `at` of 16-bit items becomes `value`; kind 1 is fp16, 2 bfloat16.
extern "C" __device__ int store_narrowed(int *, u64 to, long long at, float value, int kind)
{
    reinterpret_cast<unsigned short *>(to)[at] = kind == 1 ? narrow(Float16(), value) : narrow(Bfloat16(), value);
    return 0;
}

// *result = number / divisor, in 32 bits if both fit.
extern "C" __device__ int quotient(int *result, u64 number, int divisor)
{
    *result = number >> 32 == 0 ? (unsigned)number / (unsigned)divisor : (int)(number / (u64)divisor);
    return 0;
}
