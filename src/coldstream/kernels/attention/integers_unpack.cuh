// Unpacks keys or values of three or four bits to bytes, in place in shared memory.
#pragma once

#include "attention/integers_packing.cuh"
#include "attention/integers_tile.cuh"

namespace coldstream {

// Unpacks a tile whose rows lie at its end, by `threads` threads of which this one has number `thread`; they
// have met before, and meet at the end. All threads read some rows before they write them: as packed rows lie
// at the end, writes never reach rows that are still to be read.
template <int bits, int head_dim, int threads>
__device__ __forceinline__ void unpack_tile(uint8_t* tile, int thread) {
  using Row = CacheRow<bits, head_dim>;
  using Layout = TileLayout<Row, head_dim>;
  constexpr int units = head_dim / unit_values, total = block_positions * units, at_once = 4;
  // A row is read in two parts only if there is room for both.
  static_assert(at_once * threads % units == 0 || total % (at_once * threads) >= units ||
                total <= at_once * threads);
  const auto meet = [] {
    if constexpr (threads == warp_size)
      __syncwarp();
    else
      __syncthreads();
  };
#pragma unroll
  for (int begin = 0; begin < total; begin += at_once * threads) {
    PackedUnit<bits> found[at_once];
#pragma unroll
    for (int i = 0; i < at_once; i++) {
      const int at = begin + i * threads + thread;
      if (at < total)
        read_unit<bits, head_dim>(found[i], tile + Layout::packed_at + at / units * Row::bytes, at % units);
    }
    meet();
#pragma unroll
    for (int i = 0; i < at_once; i++) {
      const int at = begin + i * threads + thread;
      if (at >= total) continue;
      uint8_t* const to = tile + at / units * Layout::row_bytes;
      uint4* const codes = reinterpret_cast<uint4*>(to + at % units * unit_values);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint2 first = unpack_eight<bits>(found[i], 2 * half),
                    second = unpack_eight<bits>(found[i], 2 * half + 1);
        codes[half] = make_uint4(first.x, first.y, second.x, second.y);
      }
      if (at % units == 0) *reinterpret_cast<float*>(to + head_dim) = found[i].scale;
    }
  }
  meet();
}

}  // namespace coldstream
