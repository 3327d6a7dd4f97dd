// Quantised activations in the two layouts that products read; both are padded with zeros to whole groups.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "quant/blocks.h"

namespace coldstream {

inline constexpr int group_elements = 256;  // inputs in a step of a product: those of a super-block
inline constexpr int block_elements = 32;
inline constexpr int blocks_per_group = group_elements / block_elements;
inline constexpr int tile_rows = 16;

constexpr int64_t num_groups(int64_t cols) { return (cols + group_elements - 1) / group_elements; }

// Which inputs share a scale: a group, for types with super-blocks, or a block of 32, for types of such
// blocks.
enum class ActivationForm { by_group, by_block };

// The form that an integer type needs.
inline ActivationForm form_of(QuantType type) {
  const bool is_super_block = quant_geometry_find(static_cast<int>(type))->block_elements == group_elements;
  return !is_super_block ? ActivationForm::by_block : ActivationForm::by_group;
}

// One row: the layout for GEMV, and the first step to that for GEMM.
struct ActivationRow {
  // [groups * 256]; a tier that interleaves blocks has those of a group by block as [4][8][8]: eight inputs
  // of each block, then the next eight.
  int8_t* q;
  int16_t* sums;  // [groups * 16], over 16 consecutive q
  float* scales;  // [groups * scales_per_group(form)]
  ActivationForm form;

  static constexpr int scales_per_group(ActivationForm form) {
    return form == ActivationForm::by_block ? blocks_per_group : 1;
  }

  static constexpr size_t bytes(int64_t cols, ActivationForm form) {
    const size_t per_group = group_elements + 16 * sizeof(int16_t) + scales_per_group(form) * sizeof(float);
    return (num_groups(cols) * per_group + 63) / 64 * 64;
  }

  // `memory` holds bytes(cols, form) bytes and is aligned to 64.
  static ActivationRow at(std::byte* memory, int64_t cols, ActivationForm form) {
    const int64_t groups = num_groups(cols);
    auto* q = reinterpret_cast<int8_t*>(memory);
    auto* sums = reinterpret_cast<int16_t*>(q + groups * group_elements);
    return {q, sums, reinterpret_cast<float*>(sums + groups * 16), form};
  }
};

// The forms of the same inputs that some weights need: one for most, none for float weights, both for few.
class ActivationForms {
 public:
  void add(QuantType weight) {
    if (quant_is_integer(weight)) needed_[static_cast<int>(form_of(weight))] = true;
  }
  bool any() const { return needed_[0] || needed_[1]; }
  int count() const { return needed_[0] + needed_[1]; }

  // Bytes of a row in all these forms.
  size_t row_bytes(int64_t cols) const { return offset(cols, 0) + offset(cols, 1); }

  // One form of the row in `memory`, row_bytes(cols) bytes aligned to 64.
  ActivationRow row(std::byte* memory, int64_t cols, ActivationForm form) const {
    return ActivationRow::at(memory + (form == ActivationForm::by_block ? offset(cols, 0) : 0), cols, form);
  }

  // Its number among these forms.
  int index(ActivationForm form) const { return form == ActivationForm::by_block && needed_[0] ? 1 : 0; }

  template <typename F>
  void for_each(F&& f) const {
    if (needed_[0]) f(ActivationForm::by_group);
    if (needed_[1]) f(ActivationForm::by_block);
  }

 private:
  size_t offset(int64_t cols, int form) const {
    return needed_[form] ? ActivationRow::bytes(cols, static_cast<ActivationForm>(form)) : 0;
  }

  bool needed_[2] = {false, false};
};

// One group of 16 rows with the row innermost: the layout for GEMM. Lanes of a vector register, and
// columns of a matrix tile, are rows. A tier may have more consecutive inputs of each row together in a
// narrow tile, which has at most half of the rows: eight, so that q is [32][8][8], or 16 of four rows and
// then of the other four, [2][16][4][16].
inline constexpr int narrow_tile_rows = tile_rows / 2;
struct alignas(64) ActivationTile {
  int8_t q[64][tile_rows][4];  // four consecutive inputs of each row
  union {
    int16_t sums_16[8][tile_rows][2];                 // by group: over 16 inputs, two consecutive sums
    float block_scales[blocks_per_group][tile_rows];  // by block
  };
  int16_t sums_32[4][tile_rows][2];  // over 32 inputs, two consecutive sums
  float scales[tile_rows];           // by group
};
static_assert(sizeof(ActivationTile) == 4928);

// Of inputs that share a scale. If `is_zero`, their codes are zero and `inverse` is undefined.
struct SpanScale {
  float scale, inverse;
  bool is_zero;
};

// For inputs whose greatest magnitude has these bits: ordered like magnitudes, with non-finite ones on top.
static inline SpanScale span_scale(uint32_t bits) {
  const float max = std::bit_cast<float>(bits);
  const bool finite = bits < 0x7f800000u, is_zero = !finite || max < 0x1p-100f;
  const float scale = finite ? (is_zero ? 0.0f : max / 127.0f) : std::bit_cast<float>(0x7fc00000u);
  return {scale, 127.0f / max, is_zero};
}

// Scales of group g of `count` rows to rows `first` and following of a tile; zeros from num_rows on.
static inline void pack_scales(const ActivationRow* x, int num_rows, int count, ActivationForm form,
                               int64_t g, int first, ActivationTile& tile) {
  for (int t = 0; t < count; t++) {
    const bool exists = t < num_rows;
    if (form == ActivationForm::by_group) {
      tile.scales[first + t] = exists ? x[t].scales[g] : 0.0f;
    } else {
      for (int b = 0; b < blocks_per_group; b++)
        tile.block_scales[b][first + t] = exists ? x[t].scales[g * blocks_per_group + b] : 0.0f;
    }
  }
}

}  // namespace coldstream
