// Attention of several relations over table rows in 16-byte pieces, and its gradients.
//
// Called from pyg_direct/kernels/aggregate/typed_attention.py, which has the formulas; see aggregate.cu for the calling
// convention.

#include "ahead.cuh"
#include "attention.cuh"
#include "items.cuh"

__device__ __forceinline__ void store_as(Float32, u64 to, const float *value) { store_fp32<4>(to, 0, value); }
template <class Kind> __device__ __forceinline__ void store_as(Kind kind, u64 to, const float *value)
{
    store(kind, to, 0, value);
}

template <class Kind> __device__ __forceinline__ float dot_piece(u64 grad, u64 out)
{
    float a[Kind::items], b[Kind::items], total = 0.0f;
    unpack(Kind(), *reinterpret_cast<const uint4 *>(grad), a);
    load_fp32<Kind::items>(reinterpret_cast<const float *>(out), b);
#pragma unroll
    for (int i = 0; i < Kind::items; ++i) total += a[i] * b[i];
    return total;
}

// *to = the scalar product of a head of a gradient and of a sum, fp32, of which each of `lanes` threads has a piece.
extern "C" __device__ int dot_head_16(int *, u64 to, u64 grad, u64 out, int lane, int lanes, unsigned mask, int kind)
{
    float total = kind == 0   ? dot_piece<Float32>(grad, out)
                  : kind == 1 ? dot_piece<Float16>(grad, out)
                              : dot_piece<Bfloat16>(grad, out);
    total = Group{lane, lanes, mask}.sum(total);
    if (lane == 0) *reinterpret_cast<float *>(to) = total;
    return 0;
}

// Attention of several relations, for one piece of rows. Part k of a type has sizes[k] targets, from starts[k] on, of
// relation relations[k]; the three numbers of all `num_relations` parts lie at `parts`, one after the other. Target t has
// edges [ends[t], ends[t + 1]). Arrays keep their first addresses, which take no registers.
struct Parts {
    const float *by_target, *vectors;
    const int *ends, *row;
    const long long *parts;
    const uint4 *x;
    float *alpha;
    int num_relations, num_edges;
    unsigned heads, pieces, head, piece;
    float slope;
};

// Edges of a target.
struct Span {
    unsigned target;
    int first, last;
};

// Edges of the target of part k that belongs to row `line`.
__device__ __forceinline__ Span find_span(const Parts &parts, int k, int line)
{
    if (line >= (int)parts.parts[2 * parts.num_relations + k]) return {0, 0, 0};
    const unsigned target = (unsigned)parts.parts[parts.num_relations + k] + line;
    return {target, min(parts.ends[target], parts.num_edges), min(parts.ends[target + 1], parts.num_edges)};
}

// Sends the first rows of a target's edges to `rows`.
__device__ __forceinline__ void send_first(uint4 *rows, const Parts &parts, Span span)
{
    if (span.first < span.last) {
        int source[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) source[u] = parts.row[min(span.first + u, span.last - 1)];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (span.first + u < span.last)
                copy_ahead(&place_of(rows, span.first + u),
                           parts.x + (u64)(unsigned)source[u] * parts.pieces + parts.piece);
    }
    end_copies();
}

// Adds the attention of a target to `result`, and writes the weights of its edges: their sign bit is set if the score is
// not above zero. A score is bend(x[source] . vector + by_target[target]). Each row is read once, as in attend.cu. `rows`
// has the first ones or waits for them; one group of copies has been sent since.
template <class Kind>
__device__ __forceinline__ void attend_span(float *result, uint4 *rows, const Parts &parts, Span span,
                                            unsigned relation, Group group)
{
    const int items = Kind::items;
    const float own = parts.by_target[span.target * parts.heads + parts.head];
    // Each thread has the score of one of the first edges, and memory those of the others.
    const int mine_at = span.first + group.lane;
    float direction[items], total[items] = {}, best = LEAST, sum = 0.0f, mine = 0.0f;
    load_fp32<items>(parts.vectors + (u64)(relation * parts.pieces + parts.piece) * items, direction);
    wait_for_copies<1>();
    for (int e = span.first; e < span.last; ++e) {
        if (e - span.first >= AHEAD) wait_for_copies<AHEAD - 1>();
        float value[items], product = 0.0f;
        unpack(Kind(), place_of(rows, e), value);
        if (span.last - span.first > AHEAD) {
            if (e + AHEAD < span.last)
                copy_ahead(&place_of(rows, e),
                           parts.x + (u64)(unsigned)parts.row[e + AHEAD] * parts.pieces + parts.piece);
            end_copies();
        }
#pragma unroll
        for (int i = 0; i < items; ++i) product += value[i] * direction[i];
        product = group.sum(product) + own;
        if (e == mine_at) mine = product;
        else if (e >= span.first + group.lanes && parts.alpha != nullptr && group.lane == 0)
            parts.alpha[(unsigned)e * parts.heads + parts.head] = product;
        const float score = bend(product, parts.slope);
        if (score > best) {
            const float shrink = __expf(best - score);
            best = score, sum *= shrink;
#pragma unroll
            for (int i = 0; i < items; ++i) total[i] *= shrink;
        }
        const float share = __expf(score - best);
        sum += share;
#pragma unroll
        for (int i = 0; i < items; ++i) total[i] += share * value[i];
    }
    // If all scores are minus infinity, the result is a NaN, as in the softmax.
    const float scale = sum == 0.0f ? NOT_A_NUMBER : 1.0f / (sum + TINY);
    if (parts.alpha != nullptr) {
        if (span.last - span.first > group.lanes) __syncwarp(group.mask);
        for (int e = mine_at; e < span.last; e += group.lanes) {
            float *at = parts.alpha + ((unsigned)e * parts.heads + parts.head);
            const float score = e == mine_at ? mine : *at, weight = __expf(bend(score, parts.slope) - best) * scale;
            *at = score > 0.0f ? weight : -weight;
        }
    }
#pragma unroll
    for (int i = 0; i < items; ++i) result[i] += total[i] * scale;
}

template <class Kind>
__device__ __forceinline__ void attend_lines(uint4 *rows, u64 totals, const Parts &parts, u64 bias, int first_part,
                                             int last_part, unsigned first, int line, int end, int kept, int type,
                                             Group group)
{
    const int items = Kind::items, stop = first_part < last_part ? min(end, kept) : line;
    // Rows of the next target are on their way, and the edges of the one after it are found meanwhile.
    int part_ahead = first_part, line_ahead = line, turn = 0;
    auto find_ahead = [&]() {
        if (line_ahead >= stop) return Span{0, 0, 0};
        const Span span = find_span(parts, part_ahead, line_ahead);
        if (++part_ahead == last_part) part_ahead = first_part, ++line_ahead;
        return span;
    };
    Span next = find_ahead(), far = find_ahead();
    send_first(rows, parts, next);
    for (; line < end; ++line) {
        float result[items] = {};
        if (bias != 0)
            load_fp32<items>((const float *)bias + (u64)((unsigned)type * parts.pieces + parts.piece) * items, result);
        for (int k = line < stop ? first_part : last_part; k < last_part; ++k) {
            const Span span = next;
            uint4 *own = rows + turn * (AHEAD * THREADS_OF_BLOCK);
            turn ^= 1;
            next = far, far = find_ahead();
            send_first(rows + turn * (AHEAD * THREADS_OF_BLOCK), parts, next);
            if (span.first < span.last)
                attend_span<Kind>(result, own, parts, span, (unsigned)parts.parts[k], group);
        }
        store_fp32<items>(totals + ((u64)(first + (unsigned)line) * parts.pieces + parts.piece) * (items * 4), 0,
                          result);
    }
}

// One piece of the sums of rows [line, end) of a type, fp32: of each part in [first_part, last_part), the attention of
// the row's target, added up, and the type's row of `bias` unless this address is zero. The type's rows begin at row
// `first` of `totals`; those from `kept` on have no targets. `alpha` may be zero. Kind 0 is fp32, 1 fp16, 2 bfloat16.
extern "C" __device__ int attend_lines_16(int *, u64 totals, u64 alpha, u64 x, u64 by_target, u64 vectors, u64 bias,
                                          u64 ends, u64 row, u64 parts_at, int num_relations, int first_part,
                                          int last_part, int first, int line, int end, int kept, int type,
                                          int num_edges, int heads, int pieces, int head, int piece, int lane,
                                          int lanes, unsigned mask, float slope, int kind)
{
    __shared__ uint4 rows[2 * AHEAD * THREADS_OF_BLOCK];
    const Group group = {lane, lanes, mask};
    const Parts parts = {
        reinterpret_cast<const float *>(by_target), reinterpret_cast<const float *>(vectors),
        reinterpret_cast<const int *>(ends), reinterpret_cast<const int *>(row),
        reinterpret_cast<const long long *>(parts_at), reinterpret_cast<const uint4 *>(x),
        reinterpret_cast<float *>(alpha), num_relations, num_edges, (unsigned)heads, (unsigned)pieces, (unsigned)head,
        (unsigned)piece, slope};
#define ATTEND(Kind)                                                                                                 \
    attend_lines<Kind>(rows, totals, parts, bias, first_part, last_part, (unsigned)first, line, end, kept, type, group)
    if (kind == 0) ATTEND(Float32);
    else if (kind == 1) ATTEND(Float16);
    else ATTEND(Bfloat16);
#undef ATTEND
    return 0;
}

template <class Kind>
__device__ __forceinline__ void pull_scores(uint4 *rows, float *weights, u64 to_vector, float *to_edges,
                                            float *to_targets, const float *alpha, const uint4 *x, const uint4 *grad,
                                            const int *ends, const int *row, int num_edges, int target, int end,
                                            int shift, unsigned heads, unsigned pieces, unsigned head, unsigned piece,
                                            Group group, float slope)
{
    const int items = Kind::items;
    // Targets have few edges: rows of the next ones are on their way too.
    const int last = min(ends[end], num_edges);
    int i = min(ends[target], num_edges), stop = min(ends[target + 1], num_edges);
    int next = min(ends[min(target + 2, end)], num_edges), source = i < last ? row[i] : 0;
    uint4 own = grad[(u64)(unsigned)(target + shift) * pieces + piece];
    auto send = [&](int place) {
        if (place < last) {
            copy_ahead(&place_of(rows, place), x + (u64)(unsigned)source * pieces + piece);
            copy_ahead(&place_of(weights, place), alpha + (unsigned)place * heads + head);
        }
        end_copies();
        if (place + 1 < last) source = row[place + 1];
    };
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) send(i + u);
    float along[items] = {};
    for (; target < end; ++target) {
        const int first = i, mine_at = first + group.lane, far = min(ends[min(target + 3, end)], num_edges);
        // Products are counted from the first one, so that a target's only edge has exactly zero.
        float pulled[items], whole[items] = {}, base = 0.0f, total = 0.0f, sum = 0.0f, mine = 0.0f, mine_weight = 0.0f;
        unpack(Kind(), own, pulled);
        if (next > stop) own = grad[(u64)(unsigned)(target + 1 + shift) * pieces + piece];
        for (; i < stop; ++i) {
            wait_for_copies<AHEAD - 1>();
            float value[items], product = 0.0f;
            const float signed_weight = place_of(weights, i), weight = fabsf(signed_weight);
            unpack(Kind(), place_of(rows, i), value);
            send(i + AHEAD);
#pragma unroll
            for (int k = 0; k < items; ++k) product += value[k] * pulled[k];
            product = group.sum(product);
            if (i == first) base = product;
            product -= base;
            total += weight * product;
            // The sign tells that the score was not above zero.
            const float share = __float_as_uint(signed_weight) >> 31 ? weight * slope : weight;
#pragma unroll
            for (int k = 0; k < items; ++k) {
                const float part = share * value[k];
                along[k] += product * part, whole[k] += part;
            }
            if (i == mine_at) mine = product, mine_weight = signed_weight;
            else if (i >= first + group.lanes && group.lane == 0) to_edges[(unsigned)i * heads + head] = product;
        }
#pragma unroll
        for (int k = 0; k < items; ++k) along[k] -= total * whole[k];
        if (stop - first > group.lanes) __syncwarp(group.mask);
        for (int e = mine_at; e < stop; e += group.lanes) {
            float *at = to_edges + ((unsigned)e * heads + head);
            const float weight = e == mine_at ? mine_weight : alpha[(unsigned)e * heads + head];
            float share = fabsf(weight) * ((e == mine_at ? mine : *at) - total);
            if (__float_as_uint(weight) >> 31) share *= slope;
            *at = share, sum += share;
        }
        if (stop > first) sum = group.sum(sum);
        if (group.lane == 0) to_targets[(unsigned)target * heads + head] = sum;
        stop = next, next = far;
    }
    store_fp32<items>(to_vector, 0, along);
}

// Gradients of the scores of the edges of targets [target, end) of one relation before `bend`, in `to_edges`, their sums
// by target, and at `to_vector` the sum of a piece of the edges' rows times these, fp32. Target t has edges [ends[t],
// ends[t + 1]) and row t + shift of `grad`. Addresses but `to_vector` are first ones; `alpha` has the weights of
// `attend_lines_16`.
extern "C" __device__ int pull_scores_16(int *, u64 to_vector, u64 to_edges, u64 to_targets, u64 alpha, u64 x, u64 grad,
                                         u64 ends, u64 row, int num_edges, int target, int end, int shift, int heads,
                                         int pieces, int head, int piece, int lane, int lanes, unsigned mask,
                                         float slope, int kind)
{
    __shared__ uint4 rows[AHEAD * THREADS_OF_BLOCK];
    __shared__ float weights[AHEAD * THREADS_OF_BLOCK];
    const Group group = {lane, lanes, mask};
#define PULL(Kind)                                                                                                   \
    pull_scores<Kind>(rows, weights, to_vector, reinterpret_cast<float *>(to_edges),                                 \
                      reinterpret_cast<float *>(to_targets),                                                         \
                      reinterpret_cast<const float *>(alpha), reinterpret_cast<const uint4 *>(x),                    \
                      reinterpret_cast<const uint4 *>(grad), reinterpret_cast<const int *>(ends),                    \
                      reinterpret_cast<const int *>(row), num_edges, target, end, shift, (unsigned)heads,            \
                      (unsigned)pieces, (unsigned)head, (unsigned)piece, group, slope)
    if (kind == 0) PULL(Float32);
    else if (kind == 1) PULL(Float16);
    else PULL(Bfloat16);
#undef PULL
    return 0;
}

template <class Kind>
__device__ __forceinline__ void pull_row(u64 to, bool to_fp32, const uint4 *grad, const int *target, const int *edge,
                                         const float *alpha, const float *shares, const float *vector, int first,
                                         int last, int shift, unsigned heads, unsigned pieces)
{
    const int EDGES = 2;
    float result[Kind::items] = {}, direction[Kind::items], along = 0.0f;
    for (int i = first; i < last; i += EDGES) {
        uint4 raw[EDGES];
        float weight[EDGES];
#pragma unroll
        for (int u = 0; u < EDGES; ++u) {
            const int place = min(i + u, last - 1);
            const unsigned at = (unsigned)edge[place] * heads;
            raw[u] = grad[(u64)((unsigned)target[place] + (unsigned)shift) * pieces];
            weight[u] = i + u < last ? fabsf(alpha[at]) : 0.0f;
            along += i + u < last ? shares[at] : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < EDGES; ++u) {
            float value[Kind::items];
            unpack(Kind(), raw[u], value);
#pragma unroll
            for (int k = 0; k < Kind::items; ++k) result[k] += weight[u] * value[k];
        }
    }
    load_fp32<Kind::items>(vector, direction);
#pragma unroll
    for (int k = 0; k < Kind::items; ++k) result[k] += along * direction[k];
    if constexpr (Kind::items == 4) {
        store_fp32<4>(to, 0, result);
    } else {
        if (to_fp32) store_fp32<8>(to, 0, result);
        else store(Kind(), to, 0, result);
    }
}

// Gradient of a piece of a source's row from its edges [first, last) in the order by source, and from the gradients
// `shares` of their scores. `to` and `vector` are addresses of the piece; `grad` of the piece of the first row, which
// row target[i] + shift follows; `alpha` and `shares` are addresses of the head's first number. Kind 0 is fp32, 1 fp16,
// 2 bfloat16; the result is of kind `to_kind`: the kind of rows, or fp32.
extern "C" __device__ int pull_row_16(int *, u64 to, int to_kind, u64 grad, u64 target, u64 edge, u64 alpha,
                                      u64 shares, u64 vector, long long first, long long last, long long shift,
                                      int heads, int pieces, int kind)
{
#define PULL(Kind)                                                                                                   \
    pull_row<Kind>(to, to_kind == 0, reinterpret_cast<const uint4 *>(grad), reinterpret_cast<const int *>(target),   \
                   reinterpret_cast<const int *>(edge), reinterpret_cast<const float *>(alpha),                      \
                   reinterpret_cast<const float *>(shares), reinterpret_cast<const float *>(vector), (int)first,     \
                   (int)last, (int)shift, (unsigned)heads, (unsigned)pieces)
    if (kind == 0) PULL(Float32);
    else if (kind == 1) PULL(Float16);
    else PULL(Bfloat16);
#undef PULL
    return 0;
}

template <class Kind>
__device__ __forceinline__ void pull_rows(uint4 *rows, float *weights, float *parts, u64 to, const uint4 *grad,
                                          const int *indptr, const int *target, const int *edge, const float *alpha,
                                          const float *shares, const float *vector, int num_edges, int source, int end,
                                          int shift, int most, unsigned heads, unsigned pieces, unsigned head,
                                          unsigned piece)
{
    // Sources have few edges: rows of the next ones are on their way too.
    const int last = min(indptr[end], num_edges);
    int i = min(indptr[source], num_edges), stop = min(indptr[source + 1], num_edges), goal = 0;
    unsigned number = 0;
    float direction[Kind::items];
    load_fp32<Kind::items>(vector + (u64)piece * Kind::items, direction);
    auto send = [&](int place) {
        if (place < last) {
            const unsigned at = number * heads + head;
            copy_ahead(&place_of(rows, place), grad + (u64)(unsigned)(goal + shift) * pieces + piece);
            copy_ahead(&place_of(weights, place), alpha + at);
            copy_ahead(&place_of(parts, place), shares + at);
        }
        end_copies();
        if (place + 1 < last) goal = target[place + 1], number = (unsigned)edge[place + 1];
    };
    auto begin = [&]() {
        if (i < last) goal = target[i], number = (unsigned)edge[i];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) send(i + u);
    };
    begin();
    for (; source < end; ++source) {
        const int next = min(indptr[min(source + 2, end)], num_edges);
        if (stop - i > most) {
            // Slices of it are added up elsewhere.
            i = stop, stop = next;
            wait_for_copies<0>();
            begin();
            continue;
        }
        float result[Kind::items] = {}, along = 0.0f;
        for (; i < stop; ++i) {
            wait_for_copies<AHEAD - 1>();
            float value[Kind::items];
            const float weight = fabsf(place_of(weights, i));
            along += place_of(parts, i);
            unpack(Kind(), place_of(rows, i), value);
            send(i + AHEAD);
#pragma unroll
            for (int k = 0; k < Kind::items; ++k) result[k] += weight * value[k];
        }
#pragma unroll
        for (int k = 0; k < Kind::items; ++k) result[k] += along * direction[k];
        store_as(Kind(), to + ((u64)(unsigned)source * pieces + piece) * 16, result);
        stop = next;
    }
}

// Gradients of a piece of the rows of sources [source, end) of one relation, as of `pull_row_16`; but for rows of more
// than `most` edges, which are left out. All addresses are first ones: of arrays, of row 0 of `grad`, which row
// target[i] + shift follows, of the relation's `vector` and of row 0 of `to`.
extern "C" __device__ int pull_rows_16(int *, u64 to, u64 grad, u64 indptr, u64 target, u64 edge, u64 alpha, u64 shares,
                                       u64 vector, int num_edges, int source, int end, int shift, int most, int heads,
                                       int pieces, int head, int piece, int kind)
{
    __shared__ uint4 rows[AHEAD * THREADS_OF_BLOCK];
    __shared__ float weights[AHEAD * THREADS_OF_BLOCK], parts[AHEAD * THREADS_OF_BLOCK];
#define PULL(Kind)                                                                                                   \
    pull_rows<Kind>(rows, weights, parts, to, reinterpret_cast<const uint4 *>(grad), reinterpret_cast<const int *>(indptr),                \
                    reinterpret_cast<const int *>(target), reinterpret_cast<const int *>(edge),                      \
                    reinterpret_cast<const float *>(alpha), reinterpret_cast<const float *>(shares),                 \
                    reinterpret_cast<const float *>(vector), num_edges, source, end, shift, most, (unsigned)heads,   \
                    (unsigned)pieces, (unsigned)head, (unsigned)piece)
    if (kind == 0) PULL(Float32);
    else if (kind == 1) PULL(Float16);
    else PULL(Bfloat16);
#undef PULL
    return 0;
}

template <class Kind>
__device__ __forceinline__ void join_rows(u64 to, u64 total_at, const float *grad, int first, int last, int kept,
                                          unsigned pieces)
{
    const int ROWS = 2;
    float total[Kind::items] = {};
    for (int i = first; i < last; i += ROWS) {
        float value[ROWS][Kind::items];
#pragma unroll
        for (int u = 0; u < ROWS; ++u)
            load_fp32<Kind::items>(grad + (u64)min(i + u, last - 1) * pieces * Kind::items, value[u]);
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (i + u >= last) break;
#pragma unroll
            for (int k = 0; k < Kind::items; ++k) total[k] += value[u][k];
            if (i + u < kept) store_as(Kind(), to + (u64)(i + u) * pieces * 16, value[u]);
        }
    }
    store_fp32<Kind::items>(total_at, 0, total);
}

// Sum of a piece of the fp32 rows [first, last) of a gradient, fp32 at `total`. Rows below `kept` are written to `to`,
// of kind `kind`. Addresses are of the piece of row 0.
extern "C" __device__ int join_rows_16(int *, u64 to, u64 total, u64 grad, long long first, long long last,
                                       long long kept, int pieces, int kind)
{
#define JOIN(Kind)                                                                                                   \
    join_rows<Kind>(to, total, reinterpret_cast<const float *>(grad), (int)first, (int)last, (int)kept,              \
                    (unsigned)pieces)
    if (kind == 0) JOIN(Float32);
    else if (kind == 1) JOIN(Float16);
    else JOIN(Bfloat16);
#undef JOIN
    return 0;
}

// Four numbers of a sum of fp32 rows: those of `bias`, unless it is zero, and of row `row` of each part [first, last)
// that has it. Part k begins at row starts[k] of `out`, whose address is that of the piece of row 0.
extern "C" __device__ int add_parts_4(int *, u64 to, u64 out, u64 bias, u64 starts, u64 sizes, long long first,
                                      long long last, long long row, int pieces)
{
    float total[4] = {};
    if (bias != 0) load_fp32<4>(reinterpret_cast<const float *>(bias), total);
    for (long long k = first; k < last; ++k) {
        if (row >= reinterpret_cast<const long long *>(sizes)[k]) continue;
        float value[4];
        const u64 at = (u64)(reinterpret_cast<const long long *>(starts)[k] + row) * (unsigned)pieces * 4;
        load_fp32<4>(reinterpret_cast<const float *>(out) + at, value);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] += value[i];
    }
    store_fp32<4>(to, 0, total);
    return 0;
}
