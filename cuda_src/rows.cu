// Copies of table rows in 16-byte pieces, which Numba cannot express.
//
// Called from pyg_direct/kernels/gather.py. Functions follow Numba's calling convention: the first parameter is
// the place for a result, which is not used, and the return value 0 means success.

// One row of `pieces` times 16 bytes, shared by the lanes 0 .. lanes-1 of a group. Four pieces of a lane are in
// flight before the first is stored: a row is then read in one go, which DRAM serves best (measured on an H200).
extern "C" __device__ int copy_row_16(int *, unsigned long long target, unsigned long long source, long long pieces,
                                      long long lane, long long lanes)
{
    const uint4 *from = reinterpret_cast<const uint4 *>(source);
    uint4 *to = reinterpret_cast<uint4 *>(target);
    const int count = static_cast<int>(pieces), step = static_cast<int>(lanes);
    for (int piece = static_cast<int>(lane); piece < count; piece += 4 * step) {
        uint4 value[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            if (piece + u * step < count) value[u] = from[piece + u * step];
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            if (piece + u * step < count) to[piece + u * step] = value[u];
        }
    }
    return 0;
}
