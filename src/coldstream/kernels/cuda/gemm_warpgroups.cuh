// Products of warpgroups, for types with super-blocks. A weight times its scale is a number of at most 16
// bits; its two bytes are factors of two products without any scale, whose sums are the integer part of a
// group: 256 times the one plus the other. Where the number fits a byte, one product is enough.
#pragma once

#include "cuda/gemm_sums.cuh"
#include "cuda/gemm_unpack.cuh"

namespace coldstream::gemm {

// A multiprocessor's registers, for 128 threads that copy and 256 that multiply.
constexpr int copying_registers = 72, multiplying_registers = 216;

// The sums of both planes of one group, or of the low one alone.
template <class T, int nt, bool has_high>
struct PlaneProducts {
  int high[has_high ? nt : 1][4], low[nt][4];
  uint32_t codes;  // shared address

  __device__ explicit PlaneProducts(const uint8_t* stage) : codes(shared_address(stage + T::codes_at)) {}

  // Adds 32 inputs, from 32 * step on; the first step starts the sums.
  __device__ __forceinline__ void add(const uint32_t (&high_plane)[4], const uint32_t (&low_plane)[4],
                                      int step) {
    const int place = step / 4 * T::tokens * swizzled_row_bytes + step % 4 * 32;
    const uint64_t matrix = describe_swizzled(codes + place);
    if constexpr (has_high) multiply_by_four<false>(high, high_plane, matrix, step > 0);
    multiply_by_four<has_high>(low, low_plane, matrix, step > 0);
  }

  __device__ __forceinline__ void take() {
    if constexpr (has_high) take_products(high);
    take_products(low);
  }
  __device__ float total(int n, int i) const {
    if constexpr (has_high) return float(high[n][i] * 256 + low[n][i]);
    return float(of_folded<typename T::Weights>(low[n][i]));
  }
};

// The two bytes of four unsigned bytes times `scale`, plus the half-words of `bias`; no half-word may leave
// 0 … 65535.
__device__ __forceinline__ void split_products(uint32_t bytes, int scale, uint32_t bias, uint32_t& high,
                                               uint32_t& low) {
  const uint32_t even = (bytes & 0x00ff00ffu) * scale + bias;
  const uint32_t odd = __byte_perm(bytes, 0, 0x4341) * scale + bias;
  low = __byte_perm(even, odd, 0x6240);
  high = __byte_perm(even, odd, 0x7351);
}

// Q4_K and Q5_K: the planes of 32 inputs at a time.
template <class T>
struct BlockPlanes {
  using Weights = typename T::Weights;
  static constexpr bool has_high_bits = is_same<Weights, Q5_K>;
  uint32_t bytes[4][4], scales[2][2], high_bits[4];  // all of them early: loads take long

  __device__ __forceinline__ BlockPlanes(const Fragment& at, const uint8_t* stage) {
    const uint8_t* base = stage + T::weights_at;
    const uint32_t address = shared_address(base) + at.matrix_of_weights(T::weight_pitch);
#pragma unroll
    for (int c = 0; c < 4; c++) load_matrices(bytes[c], address + (has_high_bits ? 48 : 16) + 32 * c);
#pragma unroll
    for (int h = 0; h < 2; h++)
      unpack_scales(*reinterpret_cast<const uint4*>(base + (at.row + 8 * h + at.g) * T::weight_pitch),
                    scales[h]);
    if constexpr (has_high_bits) load_matrices(high_bits, address + 16);
  }

  // `step` is a constant once loops are unrolled. 32 bytes hold two steps.
  __device__ __forceinline__ void make(int step, uint32_t (&high)[4], uint32_t (&low)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t codes = (bytes[step / 2][i] >> step % 2 * 4) & 0x0f0f0f0fu;
      if constexpr (has_high_bits)
        codes |= (step < 4 ? high_bits[i] << (4 - step) : high_bits[i] >> (step - 4)) & 0x10101010u;
      split_products(codes, unsigned_byte(scales[i % 2][step / 4], step % 4), 0, high[i], low[i]);
    }
  }
};

// A lane's super-block where it lies: of row g or g + 8.
template <class T>
__device__ __forceinline__ typename T::Weights::Near lane_block(const Fragment& at, const uint8_t* stage,
                                                                int h) {
  const int row = at.row + 8 * h + at.g;
  return {stage + T::weights_at + row * T::weight_pitch +
          reinterpret_cast<const int*>(stage + T::offsets_at)[row]};
}

// The same for Q6_K. While half-words are together, products have 32768 added.
template <class T>
struct Q6_KPlanes {
  typename T::Weights::Near rows[2];
  uint32_t low_bits[4][2], high_bits[4], scales[2][2];  // of 128 inputs, for the four registers of A

  __device__ __forceinline__ Q6_KPlanes(const Fragment& at, const uint8_t* stage)
      : rows{lane_block<T>(at, stage, 0), lane_block<T>(at, stage, 1)} {}

  __device__ __forceinline__ void load_half_of(int half) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int word = 16 * (i / 2) + 4 * t;
      low_bits[i][0] = rows[i % 2].word(64 * half + word);
      low_bits[i][1] = rows[i % 2].word(64 * half + 32 + word);
      high_bits[i] = rows[i % 2].word(128 + 32 * half + word);
      scales[i % 2][i / 2] = rows[i % 2].word(192 + 8 * half + 4 * (i / 2));
    }
  }

  __device__ __forceinline__ void make(int step, uint32_t (&high)[4], uint32_t (&low)[4]) {
    const int quarter = step % 4;
    if (quarter == 0) load_half_of(step / 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t bits =
          quarter < 2 ? high_bits[i] << (4 - 2 * quarter) : high_bits[i] >> (2 * quarter - 4);
      const uint32_t codes =
          ((low_bits[i][quarter % 2] >> quarter / 2 * 4) & 0x0f0f0f0fu) | (bits & 0x30303030u);
      const int scale = signed_byte(scales[i % 2][quarter / 2], quarter % 2 * 2 + i / 2);
      // 32 is subtracted from every code: from the half-words as 32 scales.
      split_products(codes, scale, 0x80008000u - 0x00200020u * scale, high[i], low[i]);
      high[i] ^= 0x80808080u;
    }
  }
};

// The same for other types without a header.
template <class T>
struct UnpackedPlanes {
  using Weights = typename T::Weights;
  // Of interleaved types a byte serves four steps.
  static constexpr int steps_at_once = Weights::is_interleaved ? 4 : 1;
  typename Weights::Near rows[2];
  uint32_t codes[steps_at_once][4];  // for the four registers of A

  __device__ __forceinline__ UnpackedPlanes(const Fragment& at, const uint8_t* stage)
      : rows{lane_block<T>(at, stage, 0), lane_block<T>(at, stage, 1)} {}

  __device__ __forceinline__ void load(int step) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < steps_at_once; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const SplitIndex word = {t, 8 * (step + k) + i / 2 * 4};
        if constexpr (Weights::folds_scales)
          codes[k][i] = Weights::folded_word(rows[i % 2], word);
        else
          codes[k][i] = Weights::word(rows[i % 2], word) ^ 0x80808080u;  // 128 more
      }
  }

  __device__ __forceinline__ void make(int step, uint32_t (&high)[4], uint32_t (&low)[4]) {
    if (step % steps_at_once == 0) load(step);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t bytes = codes[step % steps_at_once][i];
      if constexpr (Weights::folds_scales) {
        low[i] = bytes;
      } else {
        const int scale = Weights::scale(rows[i % 2], Weights::sub_blocks == 16 ? 2 * step + i / 2 : step);
        split_products(bytes, scale, 0x80008000u - 0x00800080u * scale, high[i], low[i]);
        high[i] ^= 0x80808080u;
      }
    }
  }
};

// The floats of a lane's two rows, and for types with minima the sums of those times the activations' sums.
// They are integers below 2^24 from factors of at most eleven bits, so that float16 products are exact.
template <class T, int nt>
struct MinimumFloats {
  float d[2], dmin[2], offsets[nt][4];

  // Starts the products, which the caller commits.
  __device__ __forceinline__ MinimumFloats(const Fragment& at, const uint8_t* stage) {
    uint32_t halves[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint32_t pairs[2];  // of minima, for sums 2 t and 2 t + 1, and for those eight further
      if constexpr (T::Group::in_place)
        load_header(at, stage, h, pairs);
      else
        load_block(lane_block<T>(at, stage, h), at.t, h, pairs);
#pragma unroll
      for (int k = 0; k < 2; k++)  // 1024 + m as float16, twice, less 1024
        halves[2 * k + h] = subtract_halves(pairs[k], 0x64006400u);
    }
    begin_products();
    multiply_halves_by_four(offsets, halves, describe_plain(shared_address(stage + T::sums_at)));
  }

  __device__ __forceinline__ void take() { take_products(offsets); }

  __device__ __forceinline__ float add(float total, float scale, int n, int i, float p) const {
    p = __fmaf_rn(d[i / 2] * scale, total, p);
    return __fmaf_rn(-(dmin[i / 2] * scale), offsets[n][i], p);
  }

 private:
  __device__ __forceinline__ void load_header(const Fragment& at, const uint8_t* stage, int h,
                                              uint32_t (&pairs)[2]) {
    const int row = at.row + 8 * h + at.g;
    const uint4 head = *reinterpret_cast<const uint4*>(stage + T::weights_at + row * T::weight_pitch);
    uint32_t minima[2];
    unpack_minima(head, minima);
    d[h] = half_to_float(head.x & 0xffff);
    dmin[h] = half_to_float(head.x >> 16);
#pragma unroll
    for (int k = 0; k < 2; k++) pairs[k] = __byte_perm(minima[k], 0x64646464u, 0x4040 | at.t * 0x0101);
  }

  // A type with sixteen minima.
  template <class Block>
  __device__ __forceinline__ void load_block(const Block& block, int t, int h, uint32_t (&pairs)[2]) {
    d[h] = T::Weights::d(block);
    dmin[h] = T::Weights::dmin(block);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const uint32_t minima = T::Weights::min_word(block, 2 * k + t / 2);
      pairs[k] = __byte_perm(minima, 0x64646464u, t % 2 ? 0x4342 : 0x4140);
    }
  }
};

template <class T, int nt>
struct PlainFloats {
  float d[2];

  __device__ __forceinline__ PlainFloats(const Fragment& at, const uint8_t* stage) {
#pragma unroll
    for (int h = 0; h < 2; h++) d[h] = T::Weights::d(lane_block<T>(at, stage, h));
  }
  __device__ __forceinline__ void take() {}
  __device__ __forceinline__ float add(float total, float scale, int n, int i, float p) const {
    return __fmaf_rn(d[i / 2] * scale, total, p);
  }
};

template <bool first, class A, class B>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using Type = B;
};

template <class T, int nt>
struct Kinds {
  using Weights = typename T::Weights;
  using Loaded = typename Choose<is_same<Weights, Q6_K>, Q6_KPlanes<T>, UnpackedPlanes<T>>::Type;
  using Planes = typename Choose<T::Group::in_place, BlockPlanes<T>, Loaded>::Type;
  using Floats = typename Choose<Weights::has_mins, MinimumFloats<T, nt>, PlainFloats<T, nt>>::Type;
};

// Adds the group at `stage` for 8 * nt activation rows.
template <class T, int nt>
__device__ __forceinline__ void add_group_by_warpgroups(const Fragment& at, const uint8_t* stage,
                                                        float (&p)[T::nt][4]) {
  using Kind = Kinds<T, nt>;
  typename Kind::Planes planes(at, stage);
  typename Kind::Floats floats(at, stage);
  PlaneProducts<T, nt, !T::Weights::folds_scales> products(stage);
#pragma unroll
  for (int i = 0; i < group_size / 32; i++) {
    uint32_t high[4], low[4];
    planes.make(i, high, low);
    begin_products();
    products.add(high, low, i);
    commit_products();
    wait_for_products<1>();  // so that few planes are in registers
  }
  wait_for_products<0>();
  floats.take();
  products.take();
#pragma unroll
  for (int n = 0; n < nt; n++) {
    const float2 scales = scales_of<T>(at, stage, n);
#pragma unroll
    for (int i = 0; i < 4; i++)
      p[n][i] = floats.add(products.total(n, i), i % 2 ? scales.y : scales.x, n, i, p[n][i]);
  }
}

// The narrowest set of products that covers `count` activation rows.
template <class T>
__device__ __forceinline__ void add_group_of_by_warpgroups(int count, const Fragment& at,
                                                           const uint8_t* stage, float (&p)[T::nt][4]) {
  see_copies();
  if (count <= 16)
    add_group_by_warpgroups<T, 2>(at, stage, p);
  else if (count <= 32)
    add_group_by_warpgroups<T, 4>(at, stage, p);
  else
    add_group_by_warpgroups<T, 8>(at, stage, p);
}

}  // namespace coldstream::gemm
