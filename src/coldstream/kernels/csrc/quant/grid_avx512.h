// Grids looked up for a super-block at a time. 64 entries of four values are permuted from registers, 32 of
// eight as well or gathered from memory; see grid_loads.h.
#pragma once

#include <immintrin.h>

#include "quant/grid_loads.h"
#include "quant/traits.h"
#include "quant/unpack_avx512.h"

namespace coldstream {

namespace {

constexpr uint8_t byte_of(uint64_t word, int j) { return static_cast<uint8_t>(word >> 8 * j); }

// The different bytes of a grid's words, ascending; at most eight.
template <typename Word, size_t count>
constexpr std::array<uint8_t, 8> levels_of(const std::array<Word, count>& grid) {
  bool is_there[256] = {};
  for (const Word word : grid) {
    for (int j = 0; j < static_cast<int>(sizeof(Word)); j++) is_there[byte_of(word, j)] = true;
  }
  std::array<uint8_t, 8> levels{};
  size_t found = 0;
  for (int value = 0; value < 256; value++) {
    if (is_there[value]) levels[found++] = static_cast<uint8_t>(value);
  }
  return levels;
}

// A value is one of eight levels, twice whose number fits a nibble. One table has the first two values of
// each entry, one the others.
template <QuantType Q>
struct FoursTable {
  static constexpr const auto& grid = Traits<Q>::grid;
  static constexpr size_t num_entries = std::size(grid);
  alignas(64) uint8_t pairs[2][num_entries] = {};
  alignas(16) uint8_t unsigned_codes[16] = {};  // by twice the number of a level

  constexpr FoursTable() {
    const auto levels = levels_of(grid);
    for (int l = 0; l < 8; l++) unsigned_codes[2 * l] = static_cast<uint8_t>(Traits<Q>::offset + levels[l]);
    for (size_t i = 0; i < num_entries; i++) {
      for (int j = 0; j < 4; j++) {
        int level = 0;
        while (levels[level] != byte_of(grid[i], j)) level++;
        pairs[j / 2][i] = static_cast<uint8_t>(pairs[j / 2][i] | 2 * level << 4 * (j % 2));
      }
    }
  }
};

template <QuantType Q>
inline constexpr FoursTable<Q> fours_table{};

// The bytes of a table at 64 indices of eight bits, and a ninth bit.
template <size_t num_entries>
inline __attribute__((always_inline)) __m512i look_up_64(const uint8_t (&table)[num_entries], __m512i index,
                                                         __mmask64 ninth) {
  const __mmask64 eighth = _mm512_movepi8_mask(index);
  const auto of_256 = [&](const uint8_t* from) __attribute__((always_inline)) {
    const auto* parts = reinterpret_cast<const __m512i*>(from);
    const __m512i low =
        _mm512_permutex2var_epi8(_mm512_load_si512(parts), index, _mm512_load_si512(parts + 1));
    const __m512i high =
        _mm512_permutex2var_epi8(_mm512_load_si512(parts + 2), index, _mm512_load_si512(parts + 3));
    return _mm512_mask_blend_epi8(eighth, low, high);
  };
  if constexpr (num_entries == 256) {
    return of_256(table);
  } else {
    static_assert(num_entries == 512);
    return _mm512_mask_blend_epi8(ninth, of_256(table), of_256(table + 256));
  }
}

// A value is one of three levels, whose numbers are the two bits of a field.
template <QuantType Q>
struct EightsTable {
  static constexpr const auto& grid = Traits<Q>::grid;
  static constexpr size_t num_entries = std::size(grid);
  alignas(64) uint16_t fields[num_entries] = {};
  alignas(16) uint8_t values[16] = {};  // by the number of a level

  constexpr EightsTable() {
    const auto levels = levels_of(grid);
    for (size_t l = 0; l < 4; l++) values[l] = levels[l];
    for (size_t i = 0; i < num_entries; i++) {
      for (int j = 0; j < 8; j++) {
        int level = 0;
        while (values[level] != byte_of(grid[i], j)) level++;
        fields[i] = static_cast<uint16_t>(fields[i] | level << 2 * j);
      }
    }
  }
};

template <QuantType Q>
inline constexpr EightsTable<Q> eights_table{};

// Table entries from `first` on at 32 indices, of which the bits below `count` are looked at.
template <size_t count>
inline __attribute__((always_inline)) __m512i look_up_32(const uint16_t* first, __m512i index) {
  if constexpr (count == 64) {
    return _mm512_permutex2var_epi16(_mm512_load_si512(first), index, _mm512_load_si512(first + 32));
  } else {
    const __mmask32 is_upper =
        _mm512_test_epi16_mask(index, _mm512_set1_epi16(static_cast<short>(count / 2)));
    const __m512i lower = look_up_32<count / 2>(first, index);
    return _mm512_mask_blend_epi16(is_upper, lower, look_up_32<count / 2>(first + count / 2, index));
  }
}

// All indices of a super-block, as Traits<Q>::index has them one by one.
template <QuantType Q>
inline __attribute__((always_inline)) __m512i load_indices(const typename Traits<Q>::Block& b) {
  if constexpr (Q == QuantType::iq2_xxs) {
    return _mm512_cvtepu8_epi16(_mm512_cvtepi64_epi32(_mm512_loadu_si512(b.qs)));
  } else if constexpr (Q == QuantType::iq2_xs) {
    return _mm512_and_si512(_mm512_loadu_si512(b.qs), _mm512_set1_epi16(511));
  } else {
    static_assert(Q == QuantType::iq2_s);
    // Two more bits of each index, to the high byte of its word.
    const __m512i starts =
        _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32,
                                              34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62));
    const __m512i high = _mm512_multishift_epi64_epi8(
        _mm512_slli_epi16(starts, 8), _mm512_set1_epi64(static_cast<int64_t>(load_u64(b.qh))));
    const __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.qs)));
    return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi16(3 << 8)));
  }
}

// Signs of eight values each, of which seven bits are stored and an even number is set.
inline __attribute__((always_inline)) __m512i even_signs_64(__m512i stored) {
  const __m512i odd_nibbles = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i low = _mm512_shuffle_epi8(odd_nibbles, _mm512_and_si512(stored, nibble));
  const __m512i high =
      _mm512_shuffle_epi8(odd_nibbles, _mm512_and_si512(_mm512_srli_epi16(stored, 4), nibble));
  constexpr int xor_all = 0x96;
  return _mm512_ternarylogic_epi64(stored, low, high, xor_all);
}

// The signs of all values of a super-block, as Traits<Q>::signs has them of 64.
template <QuantType Q>
inline __attribute__((always_inline)) __m256i load_signs(const typename Traits<Q>::Block& b) {
  const auto sevens = [](__m512i words, int64_t first) __attribute__((always_inline)) {
    const __m512i starts = _mm512_set1_epi64(0x150e0700 + first * 0x01010101);
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(starts, words), _mm512_set1_epi8(127));
  };
  if constexpr (Q == QuantType::iq2_xxs) {
    return _mm512_cvtepi64_epi32(even_signs_64(sevens(_mm512_loadu_si512(b.qs), 32)));
  } else if constexpr (Q == QuantType::iq3_xxs) {
    const auto* words = reinterpret_cast<const __m256i*>(b.scales_signs);
    return _mm512_cvtepi64_epi32(even_signs_64(sevens(_mm512_cvtepu32_epi64(_mm256_loadu_si256(words)), 0)));
  } else if constexpr (Q == QuantType::iq2_xs) {
    return _mm512_cvtepi16_epi8(even_signs_64(_mm512_srli_epi16(_mm512_loadu_si512(b.qs), 9)));
  } else {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.signs));
  }
}

template <QuantType Q>
inline __attribute__((always_inline)) void load_sign_masks(const typename Traits<Q>::Block& b,
                                                           __mmask64 (&out)[4]) {
  const __m256i signs = load_signs<Q>(b);
  out[0] = static_cast<uint64_t>(_mm256_extract_epi64(signs, 0));
  out[1] = static_cast<uint64_t>(_mm256_extract_epi64(signs, 1));
  out[2] = static_cast<uint64_t>(_mm256_extract_epi64(signs, 2));
  out[3] = static_cast<uint64_t>(_mm256_extract_epi64(signs, 3));
}

// The unsigned codes of a super-block.
template <QuantType Q>
inline __attribute__((always_inline)) void load_fours(const typename Traits<Q>::Block* b, __m512i (&out)[4]) {
  using T = Traits<Q>;
  const auto& table = fours_table<Q>;
  __mmask64 signs[4];
  load_sign_masks<Q>(*b, signs);
  const __m512i index = _mm512_loadu_si512(b->qs);
  const __m512i first = look_up_64(table.pairs[0], index, T::high_bits(*b));
  const __m512i second = look_up_64(table.pairs[1], index, T::high_bits(*b));
  // Of each entry the byte with its first two values twice, then the other one twice.
  const __m512i quarter =
      _mm512_set_epi64(0x4f4f0f0f4e4e0e0e, 0x4d4d0d0d4c4c0c0c, 0x4b4b0b0b4a4a0a0a, 0x4949090948480808,
                       0x4747070746460606, 0x4545050544440404, 0x4343030342420202, 0x4141010140400000);
  const __m512i starts =
      _mm512_set1_epi64(0x3c302c201c100c00);  // of a nibble of each byte, low and high alternating
  const __m512i levels = _mm512_set1_epi8(14),
                twice_offset = _mm512_set1_epi8(static_cast<char>(2 * T::offset));
  const __m512i codes =
      _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table.unsigned_codes)));
  for (int k = 0; k < 4; k++) {
    const __m512i from = _mm512_add_epi8(quarter, _mm512_set1_epi8(static_cast<char>(16 * k)));
    const __m512i pairs = _mm512_permutex2var_epi8(first, from, second);
    const __m512i level = _mm512_and_si512(_mm512_multishift_epi64_epi8(starts, pairs), levels);
    const __m512i positive = _mm512_shuffle_epi8(codes, level);
    out[k] = _mm512_mask_sub_epi8(positive, signs[k], twice_offset, positive);
  }
}

// The unsigned codes of a super-block.
template <QuantType Q>
inline __attribute__((always_inline)) void permute_eights(const typename Traits<Q>::Block* b,
                                                          __m512i (&out)[4]) {
  using T = Traits<Q>;
  const auto& table = eights_table<Q>;
  __mmask64 signs[4];
  load_sign_masks<Q>(*b, signs);
  const __m512i fields = look_up_32<table.num_entries>(table.fields, load_indices<Q>(*b));
  const __m512i starts = _mm512_set1_epi64(0x0e0c0a0806040200), three = _mm512_set1_epi8(3);
  const __m512i values =
      _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table.values)));
  const __m128i eight[4] = {_mm512_castsi512_si128(fields), _mm512_extracti32x4_epi32(fields, 1),
                            _mm512_extracti32x4_epi32(fields, 2), _mm512_extracti32x4_epi32(fields, 3)};
  for (int k = 0; k < 4; k++) {
    const __m512i levels = _mm512_multishift_epi64_epi8(starts, _mm512_cvtepu16_epi64(eight[k]));
    const __m512i found = _mm512_shuffle_epi8(values, _mm512_and_si512(levels, three));
    out[k] = UnpackAvx512::with_signs(found, signs[k], T::offset);
  }
}

// The same codes, with entries gathered from the grid as it is.
template <QuantType Q>
inline __attribute__((always_inline)) void gather_eights(const typename Traits<Q>::Block* b,
                                                         __m512i (&out)[4]) {
  using T = Traits<Q>;
  __mmask64 signs[4];
  load_sign_masks<Q>(*b, signs);
  const __m512i all = load_indices<Q>(*b);
  const __m128i eight[4] = {_mm512_castsi512_si128(all), _mm512_extracti32x4_epi32(all, 1),
                            _mm512_extracti32x4_epi32(all, 2), _mm512_extracti32x4_epi32(all, 3)};
  for (int k = 0; k < 4; k++) {
    const __m512i found = _mm512_i32gather_epi64(_mm256_cvtepu16_epi32(eight[k]), T::grid.data(), 8);
    out[k] = UnpackAvx512::with_signs(found, signs[k], T::offset);
  }
}

template <QuantType Q>
inline __attribute__((always_inline)) void load_eights(const typename Traits<Q>::Block* b,
                                                       __m512i (&out)[4]) {
  if (gathers_grid[static_cast<int>(Q)])
    gather_eights<Q>(b, out);
  else
    permute_eights<Q>(b, out);
}

}  // namespace

}  // namespace coldstream
