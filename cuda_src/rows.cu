// Copies of table rows in 16-byte pieces, which Numba cannot express.
//
// Called from pyg_direct/kernels/gather.py. Functions follow Numba's calling convention: the first parameter is
// the place for a result, which is not used, and the return value 0 means success.

namespace {

__device__ __forceinline__ uint4 load_piece(unsigned long long source, long long piece)
{
    // A row is seldom met twice while a grid runs: non-coherent, and past the L1 cache. Address 0 reads as zeros.
    uint4 value = make_uint4(0, 0, 0, 0);
    if (source != 0) {
        const uint4 *from = reinterpret_cast<const uint4 *>(source) + piece;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "l"(from));
    }
    return value;
}

}  // namespace

// Writes up to four rows of `pieces` times 16 bytes, one after another from `target`; the lanes 0 .. lanes-1 of a
// group share each row. All loads of a step are in flight before the first store.
extern "C" __device__ int copy_rows_16(int *, unsigned long long target, unsigned long long source_0,
                                       unsigned long long source_1, unsigned long long source_2,
                                       unsigned long long source_3, long long count, long long pieces,
                                       long long lane, long long lanes)
{
    uint4 *to = reinterpret_cast<uint4 *>(target);
    for (long long piece = lane; piece < pieces; piece += lanes) {
        const uint4 value_0 = load_piece(source_0, piece);
        const uint4 value_1 = load_piece(source_1, piece);
        const uint4 value_2 = load_piece(source_2, piece);
        const uint4 value_3 = load_piece(source_3, piece);
        to[piece] = value_0;
        if (count > 1) to[pieces + piece] = value_1;
        if (count > 2) to[2 * pieces + piece] = value_2;
        if (count > 3) to[3 * pieces + piece] = value_3;
    }
    return 0;
}
