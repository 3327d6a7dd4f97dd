// Copies over the bus by loads of many lanes at once, which take latencies of microseconds to fill it.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

// Words that a warp holds between loading and storing them: `loads` of each lane.
template <typename Word, int loads>
struct Piece {
  static constexpr int64_t num_words = int64_t(loads) * warp_size;
  Word words[loads];

  // Words `begin` … of `end`.
  __device__ __forceinline__ void load(const Word* from, int64_t begin, int64_t end) {
#pragma unroll
    for (int i = 0; i < loads; i++) {
      const int64_t place = begin + i * warp_size + threadIdx.x % warp_size;
      if (place < end) words[i] = __ldcs(from + place);
    }
  }
  __device__ __forceinline__ void store(Word* to, int64_t begin, int64_t end) const {
#pragma unroll
    for (int i = 0; i < loads; i++) {
      const int64_t place = begin + i * warp_size + threadIdx.x % warp_size;
      if (place < end) __stcg(to + place, words[i]);
    }
  }
};

// Calls copy(from, to, number of words) with pointers to the longest words of which `from` and `bytes` are
// multiples.
template <typename Copy>
__device__ __forceinline__ bool copy_as_words(const uint8_t* from, uint8_t* to, int64_t bytes, Copy&& copy) {
  if ((reinterpret_cast<uint64_t>(from) | uint64_t(bytes)) % sizeof(uint4) == 0) {
    return copy(reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to),
                bytes / int64_t(sizeof(uint4)));
  }
  return copy(reinterpret_cast<const uint16_t*>(from), reinterpret_cast<uint16_t*>(to),
              bytes / int64_t(sizeof(uint16_t)));
}

}  // namespace coldstream
