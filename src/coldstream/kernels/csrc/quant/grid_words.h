// The grids of the IQ types as words: an entry's values in its bytes, lowest first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "quant/grids.h"

namespace coldstream {

template <typename Word, size_t count>
constexpr std::array<Word, count> words_of(const int8_t (&grid)[count][sizeof(Word)], int shift, int factor) {
  std::array<Word, count> words{};
  for (size_t i = 0; i < count; i++) {
    for (size_t j = 0; j < sizeof(Word); j++)
      words[i] |= static_cast<Word>(static_cast<Word>((grid[i][j] + shift) * factor) << 8 * j);
  }
  return words;
}

inline constexpr auto grid_words_iq2_xxs = words_of<uint64_t>(grid_iq2_xxs, 0, 1);
inline constexpr auto grid_words_iq2_xs = words_of<uint64_t>(grid_iq2_xs, 0, 1);
inline constexpr auto grid_words_iq2_s = words_of<uint64_t>(grid_iq2_s, 0, 1);
inline constexpr auto grid_words_iq3_xxs = words_of<uint32_t>(grid_iq3_xxs, 0, 1);
inline constexpr auto grid_words_iq3_s = words_of<uint32_t>(grid_iq3_s, 0, 1);
inline constexpr auto grid_words_iq1 =
    words_of<uint64_t>(grid_iq1, 1, 8);  // 8 (g + 1), which is not negative

}  // namespace coldstream
