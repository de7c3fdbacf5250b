// Sums over CSR of fp32 rows that several snapshots hold side by side, scaled before and after, in pieces of 16 bytes.
//
// Called from pyg_direct/kernels/scaled.py, which says what is summed; see aggregate.cu for the calling convention.

typedef unsigned long long u64;

// Multiplies four neighboring numbers with those of their snapshots, `channels` numbers each.
__device__ __forceinline__ float4 scale_4(float4 value, const float *scale, int number, int channels)
{
    int snapshot = number / channels, rest = number - snapshot * channels;
    value.x *= scale[snapshot];
    if (++rest == channels) rest = 0, ++snapshot;
    value.y *= scale[snapshot];
    if (++rest == channels) rest = 0, ++snapshot;
    value.z *= scale[snapshot];
    if (++rest == channels) rest = 0, ++snapshot;
    value.w *= scale[snapshot];
    return value;
}

// Ids of the next edges are asked for while rows of these are on their way, as in aggregate.cu.
template <bool WEIGHTED>
__device__ __forceinline__ void sum_scaled(float4 *to, const float4 *x, const int *ends, const int *row,
                                           const float *weight, int num_weights, const float *column,
                                           const float *scale, const float4 *own, const float *diagonal, int e,
                                           int last, int count, int longest, int size, int channels, unsigned pieces,
                                           int number, int adds)
{
    const int ROWS = WEIGHTED ? 4 : 5;
    int degree = last - e, after = last;
    if (count > 1) after = ends[2];
    if (degree > longest) e = last;
    unsigned source[ROWS];
#pragma unroll
    for (int u = 0; u < ROWS; ++u)
        if (e + u < last) source[u] = (unsigned)row[e + u];
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    while (true) {
        float4 value[ROWS];
        float share[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            value[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), share[u] = 1.0f;
            if (e + u < last) {
                value[u] = x[(u64)source[u] * pieces];
                if (WEIGHTED && weight != nullptr) share[u] = weight[(long long)(e + u) * num_weights];
                if (WEIGHTED && column != nullptr) share[u] *= column[(u64)source[u] * size];
            }
        }
        const bool ends_here = e + ROWS >= last;
        int next = e + ROWS, next_last = last, next_degree = degree;
        if (ends_here) {
            next = last, next_last = after, next_degree = next_last - next;
            if (next_degree > longest) next = next_last;
            if (count > 2) after = ends[3];
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u)
            if (next + u < next_last) source[u] = (unsigned)row[next + u];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (WEIGHTED) {
                total.x += share[u] * value[u].x, total.y += share[u] * value[u].y;
                total.z += share[u] * value[u].z, total.w += share[u] * value[u].w;
            } else {
                total.x += value[u].x, total.y += value[u].y, total.z += value[u].z, total.w += value[u].w;
            }
        }
        if (ends_here) {
            // Long rows are others', and what nothing is added to stays.
            if (degree <= longest && (degree > 0 || !adds)) {
                if (scale != nullptr) total = scale_4(total, scale, number, channels);
                float4 before = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (adds) before = *to;
                else if (diagonal != nullptr) before = scale_4(*own, diagonal, number, channels);
                *to = make_float4(before.x + total.x, before.y + total.y, before.z + total.z, before.w + total.w);
            }
            if (--count == 0) break;
            to += pieces, own += pieces, ++ends;
            if (scale != nullptr) scale += size;
            if (diagonal != nullptr) diagonal += size;
            total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        e = next, last = next_last, degree = next_degree;
    }
}

// Piece `piece` of the sums of `count` targets in a row, of which the first has edges [first, last) and offsets ends[0]
// and ends[1]; those of more than `longest` edges are left out. `own`, `scale` and `diagonal` begin at the first target,
// `weight` at the first snapshot of `x`. Null addresses stand for ones, a null `diagonal` for zeros; `size` times
// `channels` numbers are `pieces` pieces, and where there are weights for each snapshot or a `column`, no piece belongs
// to two snapshots. With `adds`, `to` holds something already.
extern "C" __device__ int sum_scaled_16(int *, u64 to, u64 x, u64 ends, u64 row, u64 weight, int num_weights,
                                        u64 column, u64 scale, u64 own, u64 diagonal, long long first, long long last,
                                        int count, int longest, int size, int channels, int pieces, int piece,
                                        int adds)
{
    const int head = 4 * piece / channels;
    const float *weights = reinterpret_cast<const float *>(weight);
    const float *columns = reinterpret_cast<const float *>(column);
    if (weights != nullptr && num_weights > 1) weights += head;
    if (columns != nullptr) columns += head;
#define SUM_SCALED(WEIGHTED)                                                                                        \
    sum_scaled<WEIGHTED>(reinterpret_cast<float4 *>(to) + piece, reinterpret_cast<const float4 *>(x) + piece,       \
                         reinterpret_cast<const int *>(ends), reinterpret_cast<const int *>(row), weights,          \
                         num_weights, columns, reinterpret_cast<const float *>(scale),                              \
                         reinterpret_cast<const float4 *>(own) + piece, reinterpret_cast<const float *>(diagonal),  \
                         (int)first, (int)last, count, longest, size, channels, pieces, 4 * piece, adds)
    if (weight == 0 && column == 0) SUM_SCALED(false);
    else SUM_SCALED(true);
#undef SUM_SCALED
    return 0;
}
