// Quantising and packing activations, and float products, written once over the registers of a tier. `L` has
// - Floats, Words: registers of `width` lanes of 32 bits; load, store, load_words and store_words move them;
// - fma(a, b, c): a * b + c, rounded once;
// - greater_magnitude(bits, v): of each lane the greater of `bits` and of the bits of |v|, unsigned;
// - greatest(bits): the greatest lane;
// - round_16(x, r, q): writes the products of 16 inputs with r, rounded to even, to q; returns their sum;
// - transpose(v): `width` registers as rows of a square;
// - interleaves_blocks: whether activations by block have the order of such tiers (`ActivationRow::q`);
// - add_pairs(even, odd): the sums of the two int16 of each lane, that of `even` in the low half.
#pragma once

#include <cstring>

#include "arithmetic.h"
#include "quant/activations.h"

namespace coldstream {

namespace {

// `span` inputs that share a scale.
template <class L, int span>
void quantize_span(const float* x, int8_t* q, int16_t* sums, float* scale) {
  typename L::Words bits = {};
  for (int i = 0; i < span; i += L::width) bits = L::greater_magnitude(bits, L::load(x + i));
  const SpanScale found = span_scale(L::greatest(bits));
  *scale = found.scale;
  if (found.is_zero) {
    std::memset(q, 0, span);
    std::memset(sums, 0, span / 16 * sizeof(int16_t));
    return;
  }
  for (int i = 0; i < span / 16; i++) sums[i] = L::round_16(x + 16 * i, found.inverse, q + 16 * i);
}

// A group whose inputs lie in their order, eight inputs of each block and then the next eight.
inline void interleave_blocks(const int8_t* in_order, int8_t* q) {
  for (int i = 0; i < block_elements; i += 8) {
    for (int b = 0; b < blocks_per_group; b++)
      std::memcpy(q + i * blocks_per_group + 8 * b, in_order + b * block_elements + i, 8);
  }
}

template <class L>
void quantize_row(const float* x, int64_t cols, ActivationRow out) {
  for (int64_t g = 0; g < num_groups(cols); g++) {
    const int64_t rest = cols - g * group_elements;
    const float* from = x + g * group_elements;
    float padded[group_elements] = {};
    if (rest < group_elements) {
      std::memcpy(padded, from, static_cast<size_t>(rest) * sizeof(float));
      from = padded;
    }
    int8_t* q = out.q + g * group_elements;
    int16_t* sums = out.sums + g * 16;
    if (out.form == ActivationForm::by_group) {
      quantize_span<L, group_elements>(from, q, sums, out.scales + g);
      continue;
    }
    int8_t in_order[group_elements];
    int8_t* to = L::interleaves_blocks ? in_order : q;
    for (int b = 0; b < blocks_per_group; b++) {
      quantize_span<L, block_elements>(from + b * block_elements, to + b * block_elements, sums + 2 * b,
                                       out.scales + g * blocks_per_group + b);
    }
    if (L::interleaves_blocks) interleave_blocks(in_order, q);
  }
}

// Where four inputs are that lie i-th in a group of interleaved blocks.
inline int place_in_order(int i) {
  const int eight = i / 2 / blocks_per_group, block = i / 2 % blocks_per_group;
  return (block * block_elements + eight * 8) / 4 + i % 2;
}

// Up to `width` rows to as many rows of a tile, from `first` on; missing ones become zeros.
template <class L>
void pack_unit(const ActivationRow* x, int num_rows, ActivationForm form, int64_t g, int first,
               ActivationTile& tile) {
  constexpr int width = L::width, half = width / 2;
  typename L::Words v[width];
  for (int part = 0; part < 64 / width; part++) {
    for (int t = 0; t < width; t++)
      v[t] =
          t < num_rows ? L::load_words(x[t].q + g * group_elements + 4 * width * part) : typename L::Words{};
    L::transpose(v);
    for (int i = 0; i < width; i++) {
      const bool by_block = L::interleaves_blocks && form == ActivationForm::by_block;
      L::store_words(tile.q[by_block ? place_in_order(width * part + i) : width * part + i][first], v[i]);
    }
  }
  for (int part = 0; part < 8 / width; part++) {
    for (int t = 0; t < width; t++)
      v[t] = t < num_rows ? L::load_words(x[t].sums + g * 16 + 2 * width * part) : typename L::Words{};
    L::transpose(v);
    for (int i = 0; i < width && form == ActivationForm::by_group; i++)
      L::store_words(tile.sums_16[width * part + i][first], v[i]);
    for (int i = 0; i < half; i++)
      L::store_words(tile.sums_32[half * part + i][first], L::add_pairs(v[2 * i], v[2 * i + 1]));
  }
  pack_scales(x, num_rows, width, form, g, first, tile);
}

template <class L>
void pack(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out) {
  for (int64_t g = 0; g < num_groups(cols); g++) {
    for (int first = 0; first < tile_rows; first += L::width)
      pack_unit<L>(x + first, num_rows - first, x->form, g, first, out[g]);
  }
}

// rows weight rows with one activation row: enough independent sums to hide the latency of fma.
template <class L, int rows>
void float_dots(const float* w, int64_t stride, int64_t cols, const float* x, float* out) {
  constexpr int parts = 16 / L::width;
  typename L::Floats sums[rows][parts] = {};
  int64_t i = 0;
  for (; i + 16 <= cols; i += 16) {
    typename L::Floats inputs[parts];
    for (int j = 0; j < parts; j++) inputs[j] = L::load(x + i + L::width * j);
    for (int n = 0; n < rows; n++) {
      for (int j = 0; j < parts; j++)
        sums[n][j] = L::fma(inputs[j], L::load(w + n * stride + i + L::width * j), sums[n][j]);
    }
  }
  for (int n = 0; n < rows; n++) {
    float p[16];
    for (int j = 0; j < parts; j++) L::store(p + L::width * j, sums[n][j]);
    for (int64_t j = i; j < cols; j++) p[j - i] = fma(x[j], w[n * stride + j], p[j - i]);
    out[n] = sum_lanes_16(p);
  }
}

template <class L>
void float_product(const float* w, int64_t stride, int64_t count, int64_t cols, const float* const* x,
                   int num_rows, float* const* out) {
  for (int t = 0; t < num_rows; t++) {
    int64_t n = 0;
    for (; n + 4 <= count; n += 4) float_dots<L, 4>(w + n * stride, stride, cols, x[t], out[t] + n);
    for (; n < count; n++) float_dots<L, 1>(w + n * stride, stride, cols, x[t], out[t] + n);
  }
}

}  // namespace

}  // namespace coldstream
