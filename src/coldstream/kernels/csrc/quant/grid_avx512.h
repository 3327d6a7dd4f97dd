// Grids of entries of four values, looked up in registers: 64 entries at a time, which are a super-block.
#pragma once

#include <immintrin.h>

#include "quant/traits.h"

namespace coldstream {

namespace {

// A value is one of eight levels, twice whose number fits a nibble. One table has the first two values of
// each entry, one the others.
template <QuantType Q>
struct FoursTable {
  static constexpr const auto& grid = Traits<Q>::grid;
  static constexpr size_t num_entries = std::size(grid);
  alignas(64) uint8_t pairs[2][num_entries] = {};
  alignas(16) uint8_t unsigned_codes[16] = {};  // by twice the number of a level

  constexpr FoursTable() {
    uint8_t levels[8] = {}, count = 0;
    for (int value = 0; value < 256; value++) {
      bool is_there = false;
      for (size_t i = 0; i < num_entries; i++) {
        for (int j = 0; j < 4; j++) is_there |= value_of(i, j) == value;
      }
      if (is_there) levels[count++] = static_cast<uint8_t>(value);
    }
    for (int l = 0; l < 8; l++) unsigned_codes[2 * l] = static_cast<uint8_t>(Traits<Q>::offset + levels[l]);
    for (size_t i = 0; i < num_entries; i++) {
      for (int j = 0; j < 4; j++) {
        int level = 0;
        while (levels[level] != value_of(i, j)) level++;
        pairs[j / 2][i] = static_cast<uint8_t>(pairs[j / 2][i] | 2 * level << 4 * (j % 2));
      }
    }
  }

  static constexpr int value_of(size_t i, int j) { return static_cast<int>(grid[i] >> 8 * j & 255); }
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

// The unsigned codes of a super-block.
template <QuantType Q>
inline __attribute__((always_inline)) void load_fours(const typename Traits<Q>::Block* b, __m512i (&out)[4]) {
  using T = Traits<Q>;
  const auto& table = fours_table<Q>;
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
    out[k] = _mm512_mask_sub_epi8(positive, T::signs(*b, k), twice_offset, positive);
  }
}

}  // namespace

}  // namespace coldstream
