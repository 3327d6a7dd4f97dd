// What each quantised type is: its block, the codes, scales and minimums of a block, and the float that they
// share. Every kernel of every tier is made from this page. docs/arithmetic.md has the products, the GGUF
// specification and ggml's public headers the layouts.
//
// Traits<Q> has
// - Block: its bytes;
// - super_block: whether a block is a super-block of 256 inputs, with integer scales in it;
// - block_inputs: 256, or 32 or 64 for small blocks, whose activations have a scale for every 32;
// - sub_block: inputs that share an integer scale, 16 or 32 (super-blocks);
// - has_mins: whether something is added for each sub-block (super-blocks) or block (small ones);
// - is_signed: whether the codes' bytes are int8; otherwise they are unsigned, `offset` above signed ones;
// - greatest: the greatest of the unsigned codes, or of the magnitudes of signed ones;
// - codes<U>(b, k): the bytes of inputs 64 k … 64 k + 63, unpacked by U (`UnpackAvx2` …), where b is the
//   super-block, or the first of the small blocks of 256 inputs;
// - scales(b), mins(b): of the sub-blocks (super-blocks);
// - half_d(b): the float16 that scales the block, to be multiplied by d_factor. Traits without it have d(b);
// - half_dmin(b): of super-blocks, to be multiplied by the minimums and subtracted; of small ones, to be
// added.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <bit>

#include "quant/blocks.h"
#include "quant/grid_words.h"
#include "quant/scale_bytes.h"

namespace coldstream {

// Internal to each file, because files are compiled for different instructions: the linker must not share
// code.
namespace {

#define COLDSTREAM_INLINE static inline __attribute__((always_inline))

template <QuantType Q>
struct Traits;

// The scale of most blocks is their `d`.
template <typename B>
struct ScaledBlock {
  using Block = B;
  static constexpr float d_factor = 1.0f;
  COLDSTREAM_INLINE uint16_t half_d(const B& b)
    requires requires { b.d; }
  {
    return load_u16(b.d);
  }
};

template <typename B>
struct SuperBlock : ScaledBlock<B> {
  static constexpr bool super_block = true, is_signed = false, has_mins = false;
  static constexpr bool has_fours = false, has_eights = false;
  static constexpr int block_inputs = 256;
};

// has_nibbles: whether codes are the nibbles of `qs`, or the entries that these have in `values`;
// has_fifth_bits: whether `qh` has another bit of each.
template <typename B>
struct SmallBlock : ScaledBlock<B> {
  static constexpr bool has_nibbles = false, has_fifth_bits = false;
  static constexpr bool super_block = false, is_signed = false, has_mins = false;
  static constexpr bool has_fours = false, has_eights = false;
  static constexpr int block_inputs = 32, sub_block = 32;
};

// --- blocks of 32 ---

template <typename B>
struct NibbleBlock : SmallBlock<B> {
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const B* b, int k) {
    return U::nibble_halves(b[2 * k].qs, b[2 * k + 1].qs);
  }
};

template <typename B>
struct FiveBitBlock : NibbleBlock<B> {
  static constexpr bool has_nibbles = true, has_fifth_bits = true;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const B* b, int k) {
    const uint64_t fifth = load_u32(b[2 * k].qh) | static_cast<uint64_t>(load_u32(b[2 * k + 1].qh)) << 32;
    return U::add_where(NibbleBlock<B>::template codes<U>(b, k), fifth, 16);
  }
};

template <>
struct Traits<QuantType::q4_0> : NibbleBlock<BlockQ4_0> {
  static constexpr bool has_nibbles = true;
  static constexpr int offset = 8, greatest = 15;
};

template <>
struct Traits<QuantType::q4_1> : NibbleBlock<BlockQ4_1> {
  static constexpr bool has_mins = true, has_nibbles = true;
  static constexpr int offset = 0, greatest = 15;
  COLDSTREAM_INLINE uint16_t half_dmin(const Block& b) { return load_u16(b.m); }
};

template <>
struct Traits<QuantType::q5_0> : FiveBitBlock<BlockQ5_0> {
  static constexpr int offset = 16, greatest = 31;
};

template <>
struct Traits<QuantType::q5_1> : FiveBitBlock<BlockQ5_1> {
  static constexpr bool has_mins = true;
  static constexpr int offset = 0, greatest = 31;
  COLDSTREAM_INLINE uint16_t half_dmin(const BlockQ5_1& b) { return load_u16(b.m); }
};

template <>
struct Traits<QuantType::q8_0> : SmallBlock<BlockQ8_0> {
  static constexpr bool is_signed = true;
  static constexpr int offset = 0, greatest = 128;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::halves(b[2 * k].qs, b[2 * k + 1].qs);
  }
};

alignas(16) constexpr int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};

template <>
struct Traits<QuantType::iq4_nl> : SmallBlock<BlockIQ4_NL> {
  static constexpr bool is_signed = true, has_nibbles = true;
  static constexpr const auto& values = iq4_values;
  static constexpr int offset = 0, greatest = 127;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::look_up(U::nibble_halves(b[2 * k].qs, b[2 * k + 1].qs), values);
  }
};

// Twice the values of E2M1, and 12.
alignas(16) constexpr int8_t e2m1_codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <>
struct Traits<QuantType::mxfp4> : SmallBlock<BlockMXFP4> {
  static constexpr bool has_nibbles = true;
  static constexpr const auto& values = e2m1_codes;
  static constexpr int offset = 12, greatest = 24;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::look_up(U::nibble_halves(b[2 * k].qs, b[2 * k + 1].qs), values);
  }
  // 2^(e - 128) for every e; the two smallest are subnormal.
  COLDSTREAM_INLINE float d(const Block& b) {
    return std::bit_cast<float>(b.e < 2 ? 0x200000u << b.e : (b.e - 1u) << 23);
  }
};

template <>
struct Traits<QuantType::q2_0> : SmallBlock<BlockQ2_0> {
  static constexpr int block_inputs = 64;
  static constexpr int offset = 1, greatest = 3;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::spread_crumbs_16(b[k].qs);
  }
};

// --- super-blocks with linear codes ---

template <>
struct Traits<QuantType::q2_k> : SuperBlock<BlockQ2_K> {
  static constexpr bool has_mins = true;
  static constexpr int sub_block = 16, offset = 0, greatest = 3;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::crumbs(b->qs + k / 2 * 32, k % 2 * 4);
  }
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) {
    return {load_u64(b.scales) & every_byte(15), load_u64(b.scales + 8) & every_byte(15)};
  }
  COLDSTREAM_INLINE ScaleBytes mins(const Block& b) {
    return {load_u64(b.scales) >> 4 & every_byte(15), load_u64(b.scales + 8) >> 4 & every_byte(15)};
  }
  COLDSTREAM_INLINE uint16_t half_dmin(const Block& b) { return load_u16(b.dmin); }
};

template <>
struct Traits<QuantType::q3_k> : SuperBlock<BlockQ3_K> {
  static constexpr int sub_block = 16, offset = 4, greatest = 7;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::add_bits(U::crumbs(b->qs + k / 2 * 32, k % 2 * 4), b->hmask, 2 * k, 4);
  }
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) { return unpack_scales_k3(b.scales); }
};

template <typename B>
struct K4Block : SuperBlock<B> {
  static constexpr bool has_mins = true;
  static constexpr int sub_block = 32, offset = 0;
  COLDSTREAM_INLINE ScaleBytes scales(const B& b) { return {unpack_scales_k4(b.scales).scales}; }
  COLDSTREAM_INLINE ScaleBytes mins(const B& b) { return {unpack_scales_k4(b.scales).mins}; }
  COLDSTREAM_INLINE uint16_t half_dmin(const B& b) { return load_u16(b.dmin); }
};

template <>
struct Traits<QuantType::q4_k> : K4Block<BlockQ4_K> {
  static constexpr int greatest = 15;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::nibbles(b->qs + 32 * k);
  }
};

template <>
struct Traits<QuantType::q5_k> : K4Block<BlockQ5_K> {
  static constexpr int greatest = 31;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::add_bits(U::nibbles(b->qs + 32 * k), b->qh, 2 * k, 16);
  }
};

template <>
struct Traits<QuantType::q6_k> : SuperBlock<BlockQ6_K> {
  static constexpr int sub_block = 16, offset = 32, greatest = 63;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::nibbles_and_crumbs(b->ql + k / 2 * 64, k % 2, b->qh + k / 2 * 32);
  }
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) { return {load_u64(b.scales), load_u64(b.scales + 8)}; }
};

template <>
struct Traits<QuantType::tq2_0> : SuperBlock<BlockTQ2_0> {
  static constexpr int sub_block = 32, offset = 1, greatest = 3;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::crumbs(b->qs + k / 2 * 32, k % 2 * 4);
  }
  COLDSTREAM_INLINE ScaleBytes scales(const Block&) { return {every_byte(1)}; }
};

template <>
struct Traits<QuantType::iq4_xs> : SuperBlock<BlockIQ4_XS> {
  static constexpr bool is_signed = true;
  static constexpr int sub_block = 32, offset = 0, greatest = 127;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const Block* b, int k) {
    return U::look_up(U::nibble_halves(b->qs + 32 * k, b->qs + 32 * k + 16), iq4_values);
  }
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) {
    return {minus_32(spread_nibbles(load_u32(b.scales_l)) | spread_crumbs(load_u16(b.scales_h)) << 4)};
  }
};

// --- super-blocks with codes from grids ---

// Magnitudes from a grid of eight values an entry, and signs.
template <typename B, int of_16_or_32, int greatest_magnitude>
struct GridBlock : SuperBlock<B> {
  static constexpr int sub_block = of_16_or_32, offset = greatest_magnitude,
                       greatest = 2 * greatest_magnitude;
};

// Entries of eight values: `grid` has them; index(b, k, i): the entry of inputs 64 k + 8 i … 64 k + 8 i + 7.
// A tier may look all 32 up at once.
template <QuantType Q, typename B, int of_16_or_32>
struct EightsBlock : GridBlock<B, of_16_or_32, 43> {
  static constexpr bool has_eights = true;
  static constexpr float d_factor = 0.125f;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const B* b, int k) {
    using T = Traits<Q>;
    const typename U::Bytes magnitudes = U::words([&](int i) { return T::grid[T::index(*b, k, i)]; });
    return U::with_signs(magnitudes, T::signs(*b, k), T::offset);
  }
};

template <>
struct Traits<QuantType::iq2_xxs> : EightsBlock<QuantType::iq2_xxs, BlockIQ2_XXS, 32> {
  static constexpr const auto& grid = grid_words_iq2_xxs;
  // Of each 32 inputs: four bytes of entries, then a word of four times seven signs and a scale.
  COLDSTREAM_INLINE uint32_t index(const Block& b, int k, int i) { return b.qs[16 * k + i / 4 * 8 + i % 4]; }
  COLDSTREAM_INLINE uint64_t signs(const Block& b, int k) {
    const uint8_t* words = b.qs + 16 * k + 4;
    return even_signs(spread_sevens(load_u32(words), load_u32(words + 8)));
  }
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) {
    return {odd(gather_bytes<8>(b.qs + 7) >> 4 & every_byte(15))};
  }
};

template <>
struct Traits<QuantType::iq2_xs> : EightsBlock<QuantType::iq2_xs, BlockIQ2_XS, 16> {
  static constexpr const auto& grid = grid_words_iq2_xs;
  // Words of nine bits of an entry and seven signs.
  COLDSTREAM_INLINE uint32_t index(const Block& b, int k, int i) {
    return load_u16(b.qs + 16 * k + 2 * i) & 511;
  }
  COLDSTREAM_INLINE uint64_t signs(const Block& b, int k) {
    const uint8_t* words = b.qs + 16 * k;
    return even_signs(narrow_words(load_u64(words) >> 9 & every_word(127)) |
                      narrow_words(load_u64(words + 8) >> 9 & every_word(127)) << 32);
  }
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) { return odd_nibbles(b.scales); }
};

template <>
struct Traits<QuantType::iq2_s> : EightsBlock<QuantType::iq2_s, BlockIQ2_S, 16> {
  static constexpr const auto& grid = grid_words_iq2_s;
  COLDSTREAM_INLINE uint32_t index(const Block& b, int k, int i) {
    return b.qs[8 * k + i] | (static_cast<uint32_t>(load_u16(b.qh + 2 * k)) >> 2 * i & 3) << 8;
  }
  COLDSTREAM_INLINE uint64_t signs(const Block& b, int k) { return load_u64(b.signs + 8 * k); }
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) { return odd_nibbles(b.scales); }
};

// Entries of four values: `grid` has them, `high_bits` the ninth bit of each of the 64 indices, if there are
// more than 256 entries. A tier may look all 64 up at once.
template <QuantType Q, typename B, int greatest_magnitude>
struct FoursBlock : GridBlock<B, 32, greatest_magnitude> {
  static constexpr bool has_fours = true;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const B* b, int k) {
    using T = Traits<Q>;
    const auto high = static_cast<uint16_t>(T::high_bits(*b) >> 16 * k);
    return U::with_signs(U::look_up_fours(T::grid, b->qs + 16 * k, high), T::signs(*b, k), T::offset);
  }
};

template <>
struct Traits<QuantType::iq3_xxs> : FoursBlock<QuantType::iq3_xxs, BlockIQ3_XXS, 62> {
  static constexpr float d_factor = 0.25f;
  static constexpr const auto& grid = grid_words_iq3_xxs;
  COLDSTREAM_INLINE uint64_t high_bits(const Block&) { return 0; }
  COLDSTREAM_INLINE uint64_t signs(const Block& b, int k) {
    const uint8_t* words = b.scales_signs + 8 * k;
    return even_signs(spread_sevens(load_u32(words), load_u32(words + 4)));
  }
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) {
    return {odd(gather_bytes<4>(b.scales_signs + 3) >> 4 & every_byte(15))};
  }
};

template <>
struct Traits<QuantType::iq3_s> : FoursBlock<QuantType::iq3_s, BlockIQ3_S, 15> {
  static constexpr const auto& grid = grid_words_iq3_s;
  COLDSTREAM_INLINE uint64_t high_bits(const Block& b) { return load_u64(b.qh); }
  COLDSTREAM_INLINE uint64_t signs(const Block& b, int k) { return load_u64(b.signs + 8 * k); }
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) { return {odd(spread_nibbles(load_u32(b.scales)))}; }
};

// Eight times −1, 0 or 1, and a shift of 1 up or down for eight or more codes: ups(b, k) has a bit for each
// of 64 codes that are shifted up. The grid has 8 (g + 1), which are the unsigned codes of those that are
// not.
template <QuantType Q, typename B, int of_16_or_32>
struct ShiftedGridBlock : SuperBlock<B> {
  static constexpr int sub_block = of_16_or_32, offset = 9, greatest = 18, shift = 2;
  static constexpr float d_factor = 0.125f;
  static constexpr const auto& grid = grid_words_iq1;
  template <typename U>
  COLDSTREAM_INLINE typename U::Bytes codes(const B* b, int k) {
    using T = Traits<Q>;
    const typename U::Bytes lower = U::words([&](int i) { return grid[T::index(*b, k, i)]; });
    return U::add_where(lower, T::ups(*b, k), shift);
  }
};

template <>
struct Traits<QuantType::iq1_s> : ShiftedGridBlock<QuantType::iq1_s, BlockIQ1_S, 32> {
  // Of each 32 inputs: a word of four times three bits of an entry, a scale, and whether codes are lower.
  COLDSTREAM_INLINE uint32_t index(const Block& b, int k, int i) {
    return b.qs[8 * k + i] | (static_cast<uint32_t>(load_u16(b.qh + 4 * k + i / 4 * 2)) >> i % 4 * 3 & 7)
                                 << 8;
  }
  COLDSTREAM_INLINE uint64_t ups(const Block& b, int k) {
    const uint32_t words = load_u32(b.qh + 4 * k);
    return (words & 0x8000u ? 0 : 0xffffffffull) | (words & 0x80000000u ? 0 : 0xffffffffull << 32);
  }
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) {
    return {odd(gather_bytes<2>(b.qh + 1) >> 4 & every_byte(7))};
  }
};

template <>
struct Traits<QuantType::iq1_m> : ShiftedGridBlock<QuantType::iq1_m, BlockIQ1_M, 16> {
  // Of each eight inputs: three bits of an entry, and whether codes are lower.
  COLDSTREAM_INLINE uint32_t index(const Block& b, int k, int i) {
    return b.qs[8 * k + i] | (load_u32(b.qh + 4 * k) >> 4 * i & 7) << 8;
  }
  COLDSTREAM_INLINE uint64_t ups(const Block& b, int k) {
    return (spread_nibbles(~load_u32(b.qh + 4 * k)) >> 3 & every_byte(1)) * 255;
  }
  // Three bits each, four to a word of 16 bits, whose top four are a part of d.
  COLDSTREAM_INLINE ScaleBytes scales(const Block& b) {
    uint64_t words = load_u64(b.scales), halves[2];
    for (int i = 0; i < 2; i++, words >>= 32) {
      uint64_t x = (words & 0xfff) | (words & 0xfff0000) << 16;
      x = (x | x << 10) & 0x003f003f003f003f;
      halves[i] = odd((x | x << 5) & every_byte(7));
    }
    return {halves[0], halves[1]};
  }
  COLDSTREAM_INLINE uint16_t half_d(const Block& b) {
    const uint64_t words = load_u64(b.scales) >> 12 & 0x000f000f000f000f;
    return static_cast<uint16_t>(words | words >> 12 | words >> 24 | words >> 36);
  }
};

#undef COLDSTREAM_INLINE

template <typename T>
concept HasHalfScale = requires(const typename T::Block& b) { T::half_d(b); };

inline float half_bits_to_float(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#elif defined(__aarch64__)
  return std::bit_cast<__fp16>(bits);
#else
  return half_to_float(bits);
#endif
}

// The float that scales a block's integers.
template <QuantType Q>
inline float scale_of(const typename Traits<Q>::Block& b) {
  if constexpr (HasHalfScale<Traits<Q>>) {
    return half_bits_to_float(Traits<Q>::half_d(b)) * Traits<Q>::d_factor;
  } else {
    return Traits<Q>::d(b);
  }
}

}  // namespace

}  // namespace coldstream
