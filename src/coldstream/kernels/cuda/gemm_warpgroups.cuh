// Products of warpgroups, for types with super-blocks. A weight times its scale is a number of at most 16
// bits; its two bytes are factors of two products without any scale, whose sums are the integer part of a
// group: 256 times the one plus the other. Where the number fits a byte, one product is enough.
#pragma once

#include "cuda/gemm_sums.cuh"
#include "cuda/gemm_unpack.cuh"

namespace coldstream::gemm {

// The sums of both planes of one group, or of the low one alone.
template <class T, int nt, bool has_high, bool is_halved>
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
  // `sum` is that of the activations' codes.
  __device__ float total(int n, int i, int sum) const {
    int total = low[n][i];
    if constexpr (has_high) total += high[n][i] * 256;
    if constexpr (is_halved) return float(2 * total + sum);
    return float(has_high ? total : of_folded<typename T::Weights>(total));
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

// Planes of 32 inputs at a time. With two of these steps together, their loads overlap.

// Q4_K and Q5_K.
template <class T>
struct BlockPlanes {
  using Weights = typename T::Weights;
  static constexpr bool has_high = true, is_halved = false;
  static constexpr int steps_together = 1;
  static constexpr bool has_high_bits = is_same<Weights, Q5_K>;
  uint32_t bytes[4][4], scales[2][2], high_bits[4];  // all of them early: loads take long

  __device__ __forceinline__ BlockPlanes(const Fragment& at, const uint8_t* stage, const uint8_t*) {
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
  static constexpr bool has_high = true, is_halved = false;
  static constexpr int steps_together = 1;
  typename T::Weights::Near rows[2];
  uint32_t low_bits[4][2], high_bits[4];  // of 128 inputs, for the four registers of A
  int scales[4][4];                       // of 32 inputs each, for the same

  __device__ __forceinline__ Q6_KPlanes(const Fragment& at, const uint8_t* stage, const uint8_t*)
      : rows{lane_block<T>(at, stage, 0), lane_block<T>(at, stage, 1)} {}

  __device__ __forceinline__ void load_half_of(int half) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int word = 16 * (i / 2) + 4 * t;
      low_bits[i][0] = rows[i % 2].word(64 * half + word);
      low_bits[i][1] = rows[i % 2].word(64 * half + 32 + word);
      high_bits[i] = rows[i % 2].word(128 + 32 * half + word);
#pragma unroll
      for (int k = 0; k < 4; k++) scales[k][i] = int8_t(rows[i % 2].byte(192 + 8 * half + 2 * k + i / 2));
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
      const int scale = scales[quarter][i];
      // 32 is subtracted from every code: from the half-words as 32 scales.
      split_products(codes, scale, 0x80008000u - 0x00200020u * scale, high[i], low[i]);
      high[i] ^= 0x80808080u;
    }
  }
};

// The same for types whose scales are folded into their codes.
template <class T>
struct FoldedPlanes {
  using Weights = typename T::Weights;
  static_assert(Weights::folds_scales && Weights::is_interleaved);
  static constexpr bool has_high = false, is_halved = false;
  static constexpr int steps_together = 2, byte_steps = 4;  // a byte has codes of so many
  typename Weights::Near rows[2];
  uint32_t words[byte_steps][4];  // for the four registers of A

  __device__ __forceinline__ FoldedPlanes(const Fragment& at, const uint8_t* stage, const uint8_t*)
      : rows{lane_block<T>(at, stage, 0), lane_block<T>(at, stage, 1)} {}

  __device__ __forceinline__ void load(int step) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < byte_steps; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        words[k][i] = Weights::folded_word(rows[i % 2], SplitIndex{t, 8 * (step + k) + i / 2 * 4});
  }

  __device__ __forceinline__ void make(int step, uint32_t (&)[4], uint32_t (&low)[4]) {
    if (step % byte_steps == 0) load(step);
#pragma unroll
    for (int i = 0; i < 4; i++) low[i] = words[step % byte_steps][i];
  }
};

// The same for IQ4_XS. A word of the file has the codes of a lane's two words, in turn. The levels have 128
// added, and products 32768 while half-words are together.
template <class T>
struct IQ4_XSPlanes {
  using Weights = typename T::Weights;
  static constexpr bool has_high = true, is_halved = false;
  static constexpr int steps_together = 2;
  typename Weights::Near rows[2];
  const uint4 levels;
  const uint32_t in_order;
  uint32_t scales[2][2];  // a byte each, of even steps and of odd ones

  __device__ __forceinline__ IQ4_XSPlanes(const Fragment& at, const uint8_t* stage, const uint8_t* tables)
      : rows{lane_block<T>(at, stage, 0), lane_block<T>(at, stage, 1)},
        levels(load_16(tables)),
        in_order(four_bytes(tables + 16)) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t low = rows[i / 2].word(4) >> i % 2 * 4, high = rows[i / 2].two(2) >> i % 2 * 2;
      scales[i / 2][i % 2] = subtract<32>((low & 0x0f0f0f0fu) | spread_nibbles(high & 0x3333) << 4);
    }
  }

  __device__ __forceinline__ void make(int step, uint32_t (&high)[4], uint32_t (&low)[4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t codes = rows[h].word(SplitIndex{4 * t, 8 + 16 * step});
      const uint32_t numbers = codes & 0x77777777u, halves = (codes >> 1 & 0x44444444u) | in_order;
      const uint32_t bytes[2] = {levels_of(numbers, halves), levels_of(numbers >> 16, halves >> 16)};
      const int scale = signed_byte(scales[h][step % 2], step / 2);
      const uint32_t bias = in_register(0x80008000u - 0x00800080u * scale);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        uint32_t products[2];  // two half-words each
#pragma unroll
        for (int k = 0; k < 2; k++)
          products[k] = (c == 0 ? bytes[k] & 0x00ff00ffu : __byte_perm(bytes[k], 0, 0x4341)) * scale + bias;
        low[2 * c + h] = __byte_perm(products[0], products[1], 0x6420);
        high[2 * c + h] = __byte_perm(products[0], products[1], 0x7531) ^ 0x80808080u;
      }
    }
  }

 private:
  // Of four numbers below 8 among the first eight levels or the last eight: 4 more in a nibble of `halves`.
  __device__ __forceinline__ uint32_t levels_of(uint32_t numbers, uint32_t halves) const {
    return permute(permute(levels.x, levels.y, numbers), permute(levels.z, levels.w, numbers), halves);
  }
};

// The same by look-ups.
template <class T>
struct LookupPlanes {
  using Look = Lookup<typename T::Weights>;
  static constexpr bool has_high = Look::has_high, is_halved = Look::is_halved;
  static constexpr int steps_together = 2;
  typename T::Weights::Near rows[2];
  const typename Look::Header headers[2];
  const uint8_t* tables;

  __device__ __forceinline__ LookupPlanes(const Fragment& at, const uint8_t* stage, const uint8_t* tables)
      : rows{lane_block<T>(at, stage, 0), lane_block<T>(at, stage, 1)},
        headers{typename Look::Header(rows[0]), typename Look::Header(rows[1])},
        tables(tables) {}

  __device__ __forceinline__ void make(int step, uint32_t (&high)[4], uint32_t (&low)[4]) {
    const LaneWords lane(threadIdx.x % warp_size);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint32_t high_words[2], low_words[2];
      Look::make(rows[h], headers[h], step, lane, tables, high_words, low_words);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        if constexpr (has_high) high[2 * c + h] = high_words[c];
        low[2 * c + h] = low_words[c];
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
  using Loaded = typename Choose<is_same<Weights, Q6_K>, Q6_KPlanes<T>, FoldedPlanes<T>>::Type;
  using Own = typename Choose<T::Group::in_place, BlockPlanes<T>, Loaded>::Type;
  using Looked = typename Choose<is_same<Weights, IQ4_XS>, IQ4_XSPlanes<T>, LookupPlanes<T>>::Type;
  using Planes = typename Choose<(T::lookup_bytes > 0), Looked, Own>::Type;
  using Floats = typename Choose<Weights::has_mins, MinimumFloats<T, nt>, PlainFloats<T, nt>>::Type;
};

// Adds the group at `stage` for 8 * nt activation rows.
template <class T, int nt>
__device__ __forceinline__ void add_group_by_warpgroups(const Fragment& at, const uint8_t* stage,
                                                        const uint8_t* lookups, float (&p)[T::nt][4]) {
  using Planes = typename Kinds<T, nt>::Planes;
  Planes planes(at, stage, lookups);
  typename Kinds<T, nt>::Floats floats(at, stage);
  PlaneProducts<T, nt, Planes::has_high, Planes::is_halved> products(stage);
  constexpr int steps = Planes::steps_together;
#pragma unroll
  for (int i = 0; i < group_size / 32; i += steps) {
    uint32_t high[steps][4], low[steps][4];
#pragma unroll
    for (int k = 0; k < steps; k++) planes.make(i + k, high[k], low[k]);
    begin_products();
#pragma unroll
    for (int k = 0; k < steps; k++) products.add(high[k], low[k], i + k);
    commit_products();
    wait_for_products<1>();  // so that few planes are in registers
  }
  wait_for_products<0>();
  floats.take();
  products.take();
#pragma unroll
  for (int n = 0; n < nt; n++) {
    const float2 scales = scales_of<T>(at, stage, n);
    int2 sums = {};
    if constexpr (T::has_totals) sums = totals_of<T>(at, stage, n);
#pragma unroll
    for (int i = 0; i < 4; i++)
      p[n][i] = floats.add(products.total(n, i, i % 2 ? sums.y : sums.x), i % 2 ? scales.y : scales.x, n, i,
                           p[n][i]);
  }
}

// The narrowest set of products that covers `count` activation rows.
template <class T>
__device__ __forceinline__ void add_group_of_by_warpgroups(int count, const Fragment& at,
                                                           const uint8_t* stage, const uint8_t* lookups,
                                                           float (&p)[T::nt][4]) {
  see_copies();
  if (count <= 16)
    add_group_by_warpgroups<T, 2>(at, stage, lookups, p);
  else if (count <= 32)
    add_group_by_warpgroups<T, 4>(at, stage, lookups, p);
  else
    add_group_by_warpgroups<T, 8>(at, stage, lookups, p);
}

}  // namespace coldstream::gemm
