// Attention over integers: a head's numbers as planes of bytes, and both products of a block of positions as
// sums of int32. A lane multiplies two pairs of int16 at once: over two planes those are (high, low) of the
// query or the weight and (code, high) of the key or the value, which makes high · (256 · high + low) + low ·
// high; over one plane they are the codes of two neighbours.

constexpr float two_plane_limit = 32639.0f, one_plane_limit = 127.0f;

// The Walsh–Hadamard transform of each block of the greatest power of two that divides n, a multiple of 16.
static void rotate_head(float* head, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += 256) {
    const int64_t count = n - begin < 256 ? (n - begin) / 16 : 16;
    Vec16 square[16];
    for (int64_t i = 0; i < 16; i++) square[i] = i < count ? load16(head + begin + 16 * i) : zero16();
    transpose16(square);
    for (int stride = 1; stride < 16; stride *= 2) {
      for (int i = 0; i < 16; i++) {
        if (i & stride) continue;
        const Vec16 first = square[i], second = square[i + stride];
        square[i] = add16(first, second);
        square[i + stride] = sub16(first, second);
      }
    }
    transpose16(square);
    for (int64_t i = 0; i < count; i++) store16(head + begin + 16 * i, square[i]);
  }
  for (int64_t stride = 16; stride < (n & -n); stride *= 2) {
    for (int64_t i = 0; i < n; i += 16) {
      if (i & stride) continue;
      const Vec16 first = load16(head + i), second = load16(head + i + stride);
      store16(head + i, add16(first, second));
      store16(head + i + stride, sub16(first, second));
    }
  }
}

static inline float head_factor(int64_t head_size) {
  return 1.0f / static_cast<float>(head_size & -head_size);
}

// Numbers times `factor` are their codes; with a factor of 0 all codes are 0.
struct PlaneScale {
  float factor, scale;
};

// For n numbers, a multiple of 16, whose greatest code is `limit` of `unit`.
static inline PlaneScale scale_planes(const float* x, int64_t n, float limit, float unit) {
  Vec16 greatest = zero16(), poison = zero16();
  for (int64_t i = 0; i < n; i += 16) {
    const Vec16 v = load16(x + i);
    greatest = max16(greatest, max16(v, sub16(zero16(), v)));
    poison = fma16(v, zero16(), poison);
  }
  const float maximum = greatest16(greatest);
  // Zero times what is not finite is NaN.
  if (sum16(poison) != 0.0f) return {0.0f, __builtin_nanf("")};
  if (maximum < 0x1p-100f) return {0.0f, 0.0f};
  return {limit / maximum, maximum / (limit * unit)};
}

static inline PlaneScale scale_two_planes(const float* x, int64_t n) {
  return scale_planes(x, n, two_plane_limit, 1.0f / 256);
}

static inline Ints16 codes_of(const float* x, float factor) {
  if (factor == 0.0f) return splat_ints(0);
  const Vec16 magic = splat16(0x1.8p23f);  // adding it rounds to an integer, which the low bits then hold
  return sub_ints(bits_of_floats(add16(mul16(load16(x), splat16(factor)), magic)), bits_of_floats(magic));
}

static inline Ints16 high_of(Ints16 codes) { return over_256(add_ints(codes, splat_ints(128))); }

// 16 codes of two planes as the operands that meet a cache of planes.
template <int planes>
static inline void store_operands(Ints16 codes, int32_t* out, int64_t at) {
  if constexpr (planes == 2) {
    const Ints16 high = high_of(codes);
    store_ints(out + at, join_ints(high, sub_ints(codes, times_256(high))));
  } else {
    int32_t lanes[16];
    store_ints(lanes, codes);
    for (int i = 0; i < 8; i++) out[at / 2 + i] = (lanes[2 * i] & 0xffff) | lanes[2 * i + 1] * 65536;
  }
}

// Numbers [n], a multiple of 16, in two planes → operands; returns the scale over 256.
template <int planes>
static inline float round_operands(const float* x, int64_t n, int32_t* out) {
  const PlaneScale to = scale_two_planes(x, n);
  for (int64_t i = 0; i < n; i += 16) store_operands<planes>(codes_of(x + i, to.factor), out, i);
  return to.scale * (1.0f / 256);
}

// head is rotated in place; query: operands, and the scale over 256 where they have it.
template <typename Operands>
static void round_query(float* head, int32_t* query, int64_t n) {
  rotate_head(head, n);
  const Vec16 factor = splat16(head_factor(n));
  for (int64_t i = 0; i < n; i += 16) store16(head + i, mul16(load16(head + i), factor));
  const float scale = Operands::round(head, n, query);
  memcpy(query + Operands::query_scale(n), &scale, sizeof(scale));
}

// head is rotated in place; row: planes, scale, zeros, as cache_layout.py has them.
template <int planes>
static void store_planes(float* head, void* to, int64_t n) {
  rotate_head(head, n);
  auto* row = static_cast<int8_t*>(to);
  const PlaneScale scale =
      planes == 2 ? scale_two_planes(head, n) : scale_planes(head, n, one_plane_limit, 1.0f);
  for (int64_t i = 0; i < n; i += 16) {
    const Ints16 codes = codes_of(head + i, scale.factor);
    const Ints16 high = planes == 2 ? high_of(codes) : codes;
    store_bytes(row + i, high);
    if (planes == 2) store_bytes(row + n + i, sub_ints(codes, times_256(high)));
  }
  const float tail[4] = {scale.scale};
  memcpy(row + planes * n, tail, sizeof(tail));
}

#include "ops/packed_rows.inl"

// Operands of 16 numbers in two planes, or of 32 in one.
template <int planes>
static inline Ints16 load_operands(const int8_t* row, int64_t at, int64_t head_size) {
  if constexpr (planes == 1) return widen_byte_pairs(row + 2 * at);
  return join_planes(row + at, row + head_size + at);
}

template <int planes>
static inline void load_scales(const int8_t* rows, int64_t stride, int64_t n, int64_t head_size,
                               float* scales) {
  for (int64_t p = 0; p < attention_block; p++) {
    scales[p] = 0.0f;
    if (p < n) memcpy(scales + p, rows + p * stride + planes * head_size, sizeof(float));
  }
}

// keys [n] → operands [head_size · planes / 2, attention_block], those of positions from n on undefined.
template <int planes>
static inline void pack_integer_keys(const int8_t* keys, int64_t stride, int64_t n, int64_t head_size,
                                     int32_t* packed) {
  const int64_t num_steps = head_size * planes / 2;
  for (int64_t position = 0; position < n; position += 16) {
    for (int64_t i = 0; i < num_steps; i += 16) {
      Vec16 square[16];
      for (int64_t p = 0; p < 16; p++) {
        const int64_t at = position + p < n ? position + p : n - 1;
        square[p] = floats_of_bits(load_operands<planes>(keys + at * stride, i, head_size));
      }
      transpose16(square);
      for (int64_t j = 0; j < 16 && i + j < num_steps; j++) {
        store_ints(packed + (i + j) * attention_block + position, bits_of_floats(square[j]));
      }
    }
  }
}

// values [n] → operands [n, head_size] of two planes, [(n + 1) / 2, head_size] of one, an absent
// neighbour anything, as it meets a weight of 0.
template <int planes>
static inline void pack_integer_values(const int8_t* values, int64_t stride, int64_t n, int64_t head_size,
                                       int32_t* packed) {
  for (int64_t p = 0; p < n; p += 3 - planes) {
    const int8_t* row = values + p * stride;
    for (int64_t i = 0; i < head_size; i += 16, packed += 16) {
      if constexpr (planes == 2) {
        store_ints(packed, load_operands<planes>(row, i, head_size));
      } else {
        store_ints(packed, join_neighbours(row + i, row + (p + 1 < n ? stride : 0) + i));
      }
    }
  }
}

// finish(row, column, sums) for all rows and each 16 columns, with the sums of Σ_i a[row, i] · b[i, column].
template <int R, int V, typename Finish>
static inline void multiply_rows(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride,
                                 int64_t num_rows, int64_t n, int64_t row, int64_t column,
                                 const Finish& finish) {
  for (; row + R <= num_rows; row += R) {
    Ints16 sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[r][v] = splat_ints(0);
    }
    for (int64_t i = 0; i < n; i++) {
      Ints16 columns[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) columns[v] = load_ints(b + i * b_stride + column + 16 * v);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Ints16 factor = splat_ints(a[(row + r) * a_stride + i]);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sums[r][v] = add_products(factor, columns[v], sums[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) finish(row + r, column + 16 * v, ints_to_floats(sums[r][v]));
    }
  }
  if constexpr (R > 1) {
    multiply_rows<R / 2, V>(a, a_stride, b, b_stride, num_rows, n, row, column, finish);
  }
}

// For num_columns a multiple of 16.
template <typename Finish>
static inline void multiply_integers(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride,
                                     int64_t num_rows, int64_t num_columns, int64_t n, const Finish& finish) {
  int64_t column = 0;
  for (; column + 16 * tile_vectors <= num_columns; column += 16 * tile_vectors) {
    multiply_rows<tile_rows, tile_vectors>(a, a_stride, b, b_stride, num_rows, n, 0, column, finish);
  }
  for (; column < num_columns; column += 16) {
    multiply_rows<tile_rows, 1>(a, a_stride, b, b_stride, num_rows, n, 0, column, finish);
  }
}

// Pairs of int16, which every tier multiplies. query_scale: where a query's scale lies.
template <int planes>
struct PairOperands {
  static constexpr int64_t query_scale(int64_t size) { return size; }

  static constexpr bool has_key_rows = false;  // whether few queries meet keys in the layout of the cache

  static float round(const float* x, int64_t n, int32_t* out) { return round_operands<planes>(x, n, out); }

  static void pack_keys(const int8_t* keys, int64_t stride, int64_t n, int64_t size, int32_t* packed) {
    pack_integer_keys<planes>(keys, stride, n, size, packed);
  }

  static void pack_values(const int8_t* values, int64_t stride, int64_t n, int64_t size, int32_t* packed) {
    pack_integer_values<planes>(values, stride, n, size, packed);
  }

  template <typename Finish>
  static void multiply_keys(const int32_t* queries, const int32_t* keys, int64_t num_rows,
                            int64_t num_columns, int64_t size, const Finish& finish) {
    multiply_integers(queries, integer_query_ints(size), keys, attention_block, num_rows, num_columns,
                      size * planes / 2, finish);
  }

  template <typename Finish>
  static void multiply_values(const int32_t* weights, const int32_t* values, int64_t num_rows, int64_t n,
                              int64_t size, const Finish& finish) {
    const int64_t num_steps = planes == 2 ? n : (n + 1) / 2;
    multiply_integers(weights, attention_block, values, size, num_rows, size, num_steps, finish);
  }
};

// Whether so many queries meet keys as the cache has them: sums across lanes then take less than transposing.
static inline bool takes_key_rows(int64_t num_rows, int64_t size) { return 16 * num_rows < size; }

template <int bits, typename Operands>
static void attend_integers(const AttentionChunk& chunk) {
  constexpr int planes = bits == 16 ? 2 : 1;
  const int64_t size = chunk.head_size, row_floats = attention_row_floats(size);
  const int64_t query_ints = integer_query_ints(size), most_rows = rows_at_once(chunk);
  const auto* queries = static_cast<const int32_t*>(chunk.q);
  float* scores = chunk.memory;
  float* key_scales = scores + attention_block * most_rows;
  float* value_scales = key_scales + attention_block;
  float* factors = value_scales + attention_block;
  float* weight_scales = factors + most_rows;
  // The same memory holds floats before and operands behind.
  auto* keys = reinterpret_cast<int32_t*>(weight_scales + most_rows);
  int32_t* values = keys + attention_block * size;
  int32_t* weights = values + attention_block * size;
  auto* unpacked = reinterpret_cast<int8_t*>(weights + attention_block * most_rows);
  const bool by_rows = Operands::has_key_rows && takes_key_rows(chunk.num_tokens * chunk.group, size);
  RowView of_keys = {};
  const auto pack = [&](int64_t offset, int64_t n) {
    of_keys =
        plane_rows<bits>(chunk, chunk.keys, offset, n, by_rows ? reinterpret_cast<int8_t*>(keys) : unpacked);
    if (!by_rows) Operands::pack_keys(of_keys.first, of_keys.stride, n, size, keys);
    load_scales<planes>(of_keys.first, of_keys.stride, n, size, key_scales);
    const auto of_values = plane_rows<bits>(chunk, chunk.values, offset, n, unpacked);
    Operands::pack_values(of_values.first, of_values.stride, n, size, values);
    load_scales<planes>(of_values.first, of_values.stride, n, size, value_scales);
  };
  walk_blocks<int8_t>(chunk, pack, [&](int64_t head, int64_t first_row, int64_t num_rows, SeenPart seen) {
    const int64_t n = seen.end;
    const int32_t* q = queries + head * chunk.q_stride + first_row * query_ints;
    const auto score = [&](int64_t r, int64_t column, Vec16 products) {
      float scale;
      memcpy(&scale, q + r * query_ints + Operands::query_scale(size), sizeof(scale));
      store16(scores + r * attention_block + column,
              mul16(mul16(products, splat16(scale)), load16(key_scales + column)));
    };
    if constexpr (Operands::has_key_rows) {
      if (by_rows) Operands::multiply_key_rows(q, of_keys, n, num_rows, size, score);
    }
    if (!by_rows) Operands::multiply_keys(q, keys, num_rows, head_floats(n), size, score);
    float* rows = chunk.rows + head * chunk.rows_stride + first_row * row_floats;
    for (int64_t r = 0; r < num_rows; r++) {
      float *row = rows + r * row_floats + size, *row_scores = scores + r * attention_block;
      factors[r] = advance_softmax(row_scores, seen, row, row + 1);
      for (int64_t i = 0; i < attention_block; i += 16) {
        const Vec16 scaled = mul16(load16(row_scores + i), load16(value_scales + i));
        store16(row_scores + i, keep16(scaled, n - i, 0.0f));
      }
      for (int64_t i = 0; i < seen.from; i++) row_scores[i] = 0.0f;  // whatever scales lie there
      if (seen.chosen != all_chosen) hide(row_scores, seen.chosen, 0.0f);
      weight_scales[r] = Operands::round(row_scores, attention_block, weights + r * attention_block);
    }
    Operands::multiply_values(
        weights, values, num_rows, n, size, [&](int64_t r, int64_t column, Vec16 products) {
          float* o = rows + r * row_floats + column;
          const Vec16 kept = seen.first ? zero16() : mul16(load16(o), splat16(factors[r]));
          store16(o, fma16(splat16(weight_scales[r]), products, kept));
        });
  });
}

static void attend_finish_rotated(const float* total, float sum, HeadGate gate, float* out,
                                  int64_t head_size) {
  const Vec16 inverse = splat16(1.0f / sum), factor = splat16(head_factor(head_size));
  for (int64_t i = 0; i < head_size; i += 16) store16(out + i, mul16(load16(total + i), inverse));
  rotate_head(out, head_size);
  for (int64_t i = 0; i < head_size; i += 16) {
    const Vec16 value = mul16(load16(out + i), factor);
    store16(out + i, gate.kind == OutputGate::none ? value : mul16(value, opened16(gate, i, 16)));
  }
}
