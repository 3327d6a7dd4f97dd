// Codes from grids on the avx2 tier: where a super-block's entries lie, and its signs, a super-block at a
// time. They go through memory, from which each 32 codes are looked up. unpack_generic.h and the traits say
// one by one what these give.
#pragma once

#include "quant/traits.h"
#include "quant/unpack_avx2.h"

namespace coldstream {

namespace {

// Whether a type's grid has magnitudes, and its blocks have signs. Entries of the other grid are shifted.
template <QuantType Q>
inline constexpr bool has_signs = Traits<Q>::has_fours || Traits<Q>::has_eights;

template <QuantType Q>
inline constexpr bool has_grid = requires { Traits<Q>::grid; };

// Signs of eight values each, of which seven bits are stored and an even number is set.
inline __attribute__((always_inline)) __m256i even_signs_32(__m256i stored) {
  const __m256i odd_nibbles = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
  const __m256i nibbles =
      _mm256_and_si256(_mm256_xor_si256(stored, _mm256_srli_epi16(stored, 4)), _mm256_set1_epi8(15));
  return _mm256_or_si256(stored, _mm256_shuffle_epi8(odd_nibbles, nibbles));
}

// The four lowest fields of seven bits of each word, one per byte.
inline __attribute__((always_inline)) __m256i spread_sevens(__m256i words) {
  const auto field = [&](int i) __attribute__((always_inline)) {
    return _mm256_and_si256(_mm256_slli_epi32(words, i), _mm256_set1_epi32(0x7f << 8 * i));
  };
  return _mm256_or_si256(_mm256_or_si256(field(0), field(1)), _mm256_or_si256(field(2), field(3)));
}

// Of each 32 values of a type whose signs have seven bits: the word with four such fields and a scale above.
template <QuantType Q>
inline __attribute__((always_inline)) __m256i load_sign_words(const typename Traits<Q>::Block& b) {
  if constexpr (Q == QuantType::iq2_xxs) {
    const __m256 first = _mm256_castsi256_ps(load_256(b.qs)),
                 second = _mm256_castsi256_ps(load_256(b.qs + 32));
    return _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd)), 0xd8);
  } else {
    static_assert(Q == QuantType::iq3_xxs);
    return load_256(b.scales_signs);
  }
}

// Words of 16 bits as bytes, in their order.
inline __attribute__((always_inline)) __m256i narrow(__m256i first, __m256i second) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8);
}

// Sixteen words of the bytes at `from`, by `order`.
inline __attribute__((always_inline)) __m256i spread_words(const void* from, __m256i order) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadl_epi64(static_cast<const __m128i*>(from))),
                             order);
}

inline __attribute__((always_inline)) __m256i widen_bytes(const uint8_t* from) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

template <QuantType Q>
class GridCodes {
  using T = Traits<Q>;
  using Block = typename T::Block;
  static constexpr int num_entries = T::has_fours ? 64 : 32;

 public:
  // Whether indices are bytes of the block, and scales lie above the signs.
  static constexpr bool in_place = Q == QuantType::iq2_xxs || Q == QuantType::iq3_xxs;

  inline __attribute__((always_inline)) explicit GridCodes(const Block& b) : b_(b) {
    unpack(b);
    asm("" : "+m"(*this));
  }

  // Codes 32 j … 32 j + 31, without their signs.
  inline __attribute__((always_inline)) __m256i codes(int j) const {
    __m256i found;
    if constexpr (Q == QuantType::iq3_s) {
      uint64_t packed = packed_indices(2 * j), next = packed_indices(2 * j + 1);
      const __m128i low = four_of_four(packed);
      found = _mm256_set_m128i(four_of_four(next), low);
    } else {
      uint64_t packed = packed_indices(j);
      const __m128i low = T::has_fours ? four_of_four(packed) : two_of_eight(packed);
      found = _mm256_set_m128i(T::has_fours ? four_of_four(packed) : two_of_eight(packed), low);
    }
    if constexpr (!has_signs<Q>) found = _mm256_add_epi8(found, spread_eights(bytes_, j));
    return found;
  }

  // The scale of codes 32 j … 32 j + 31 in each lane of 16 bits, if the type has it beside the signs.
  inline __attribute__((always_inline)) __m256i scales(int j) const {
    return _mm256_set1_epi32(static_cast<int>(scale_pairs_[j]));
  }

  // 1 and -1 of codes 32 j … 32 j + 31.
  inline __attribute__((always_inline)) __m256i signs(int j) const {
    const __m256i one = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const uint8_t* from = bytes_;
    if constexpr (Q == QuantType::iq2_s || Q == QuantType::iq3_s) from = b_.signs;
    const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(spread_eights(from, j), one), one);
    return _mm256_or_si256(negative, _mm256_set1_epi8(1));
  }

 private:
  // Four bytes, eight times each.
  static inline __attribute__((always_inline)) __m256i spread_eights(const uint8_t* from, int j) {
    const __m256i order = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    return _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(load_u32(from + 4 * j))), order);
  }

  // A word of the grid in the lowest lane. Left to itself the compiler inserts it into another register,
  // which only one unit does.
  static inline __attribute__((always_inline)) __m128i look_up(uint64_t index) {
    __m128i v;
    if constexpr (T::has_fours) {
      asm("vmovd %1, %0" : "=x"(v) : "m"(T::grid[index]));
    } else {
      asm("vmovq %1, %0" : "=x"(v) : "m"(T::grid[index]));
    }
    return v;
  }
  // Takes indices from the low end of `packed`: a load for several leaves more loads for the grid.
  static inline __attribute__((always_inline)) __m128i look_up_next(uint64_t& packed) {
    const uint64_t index = in_place ? packed & 255 : packed & 65535;
    packed >>= in_place ? 8 : 16;
    return look_up(index);
  }
  static inline __attribute__((always_inline)) __m128i two_of_eight(uint64_t& packed) {
    const __m128i first = look_up_next(packed);
    return _mm_unpacklo_epi64(first, look_up_next(packed));
  }
  static inline __attribute__((always_inline)) __m128i four_of_four(uint64_t& packed) {
    const __m128i first = look_up_next(packed), second = look_up_next(packed), third = look_up_next(packed);
    return _mm_unpacklo_epi64(_mm_unpacklo_epi32(first, second),
                              _mm_unpacklo_epi32(third, look_up_next(packed)));
  }
  // Indices of codes 32 j + 16 half and following, in the lowest bits.
  inline __attribute__((always_inline)) uint64_t packed_indices(int j) const {
    if constexpr (Q == QuantType::iq2_xxs) return load_u32(b_.qs + 8 * j);
    if constexpr (Q == QuantType::iq3_xxs) return load_u64(b_.qs + 8 * j);
    return load_u64(reinterpret_cast<const uint8_t*>(index_ + 4 * j));
  }

  inline __attribute__((always_inline)) void store_indices(int first, __m256i v) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(index_ + first), v);
  }
  inline __attribute__((always_inline)) void store_bytes(__m256i v) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes_), v);
  }

  // Words of four times seven signs, below a scale of four bits that stands for an odd number.
  inline __attribute__((always_inline)) void unpack_sign_words(__m256i words) {
    store_bytes(even_signs_32(spread_sevens(words)));
    const __m256i odd =
        _mm256_or_si256(_mm256_slli_epi32(_mm256_srli_epi32(words, 28), 1), _mm256_set1_epi32(1));
    _mm256_store_si256(reinterpret_cast<__m256i*>(scale_pairs_),
                       _mm256_or_si256(odd, _mm256_slli_epi32(odd, 16)));
  }
  inline __attribute__((always_inline)) void unpack(const BlockIQ2_XXS& b) {
    unpack_sign_words(load_sign_words<Q>(b));
  }
  inline __attribute__((always_inline)) void unpack(const BlockIQ3_XXS& b) {
    unpack_sign_words(load_sign_words<Q>(b));
  }
  inline __attribute__((always_inline)) void unpack(const BlockIQ2_XS& b) {
    const __m256i first = load_256(b.qs), second = load_256(b.qs + 32), mask = _mm256_set1_epi16(511);
    store_indices(0, _mm256_and_si256(first, mask));
    store_indices(16, _mm256_and_si256(second, mask));
    store_bytes(even_signs_32(narrow(_mm256_srli_epi16(first, 9), _mm256_srli_epi16(second, 9))));
  }
  inline __attribute__((always_inline)) void unpack(const BlockIQ2_S& b) {
    const __m256i order = _mm256_setr_epi8(0, -1, 0, -1, 0, -1, 0, -1, 1, -1, 1, -1, 1, -1, 1, -1, 2, -1, 2,
                                           -1, 2, -1, 2, -1, 3, -1, 3, -1, 3, -1, 3, -1);
    const __m256i to_ninth = _mm256_set1_epi64x(0x0004001000400100);
    for (int h = 0; h < 2; h++) {
      const __m256i high = _mm256_mullo_epi16(spread_words(b.qh + 4 * h, order), to_ninth);
      store_indices(16 * h, _mm256_or_si256(widen_bytes(b.qs + 16 * h),
                                            _mm256_and_si256(high, _mm256_set1_epi16(3 << 8))));
    }
  }
  inline __attribute__((always_inline)) void unpack(const BlockIQ3_S& b) {
    const __m256i one =
        _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    for (int k = 0; k < 4; k++) {
      const __m256i bits =
          _mm256_and_si256(_mm256_set1_epi16(static_cast<short>(load_u16(b.qh + 2 * k))), one);
      const __m256i ninth = _mm256_and_si256(_mm256_cmpeq_epi16(bits, one), _mm256_set1_epi16(256));
      store_indices(16 * k, _mm256_or_si256(widen_bytes(b.qs + 16 * k), ninth));
    }
  }
  inline __attribute__((always_inline)) void unpack(const BlockIQ1_S& b) {
    const __m256i order = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 4, 5, 4, 5, 4, 5,
                                           4, 5, 6, 7, 6, 7, 6, 7, 6, 7);
    __m256i ups[2];
    for (int h = 0; h < 2; h++) {
      const __m256i words = spread_words(b.qh + 8 * h, order);
      // Three bits each, from bits 0, 3, 6 and 9 to bit 8.
      const __m256i moved = _mm256_mullo_epi16(words, _mm256_set1_epi64x(0x0000000400200100));
      const __m256i high = _mm256_blend_epi16(moved, _mm256_srli_epi16(words, 1), 0x88);
      store_indices(16 * h, _mm256_or_si256(widen_bytes(b.qs + 16 * h),
                                            _mm256_and_si256(high, _mm256_set1_epi16(7 << 8))));
      ups[h] = _mm256_andnot_si256(_mm256_srai_epi16(words, 15), _mm256_set1_epi16(T::shift));
    }
    store_bytes(narrow(ups[0], ups[1]));
  }
  inline __attribute__((always_inline)) void unpack(const BlockIQ1_M& b) {
    const __m256i order = _mm256_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4,
                                           -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1);
    __m256i ups[2];
    for (int h = 0; h < 2; h++) {
      const __m256i high =
          _mm256_mullo_epi16(spread_words(b.qh + 8 * h, order), _mm256_set1_epi32(0x00100100));
      store_indices(16 * h, _mm256_or_si256(widen_bytes(b.qs + 16 * h),
                                            _mm256_and_si256(high, _mm256_set1_epi16(7 << 8))));
      const __m256i lower = _mm256_and_si256(high, _mm256_set1_epi16(8 << 8));
      ups[h] =
          _mm256_and_si256(_mm256_cmpeq_epi16(lower, _mm256_setzero_si256()), _mm256_set1_epi16(T::shift));
    }
    store_bytes(narrow(ups[0], ups[1]));
  }

  const Block& b_;
  alignas(32) uint16_t index_[in_place ? 1 : num_entries];
  alignas(32) uint32_t scale_pairs_[in_place ? 8 : 1];  // each scale twice
  alignas(32) uint8_t bytes_[32];  // the signs of eight codes each, or what is added to them
};

// The codes of a super-block, as Traits has them.
template <QuantType Q>
inline __attribute__((always_inline)) void load_grid_codes(const typename Traits<Q>::Block& b,
                                                           __m256i (&part)[8]) {
  const GridCodes<Q> grid(b);
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) {
    part[j] = grid.codes(j);
    if constexpr (has_signs<Q>)
      part[j] = _mm256_add_epi8(_mm256_sign_epi8(part[j], grid.signs(j)),
                                _mm256_set1_epi8(static_cast<char>(Traits<Q>::offset)));
  }
}

}  // namespace

}  // namespace coldstream
