// Keys as they lie in the cache, without memory of their own: 64 bytes of a key meet as many of a query, and
// the lanes of each sum are added at the end. With few queries this takes less than transposing keys.

// A query and a key of a chunk, sixteen of which are multiplied at once: R queries with 16 / R keys.
struct KeyTile {
  const int32_t* queries;
  int64_t query_stride;  // ints
  const int8_t* keys[16];
};

// Lane i: the sum of all lanes of v[i]; v is changed.
static inline Ints16 sum_each_16(__m512i v[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) v[i] = merge_32(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) v[i] = merge_64(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) v[i] = merge_128(v[2 * i], v[2 * i + 1]);
  return {merge_128(v[0], v[1])};
}

// Two planes: Σ key · query, for keys raised by 128.
template <int R>
static inline void multiply_tile_of_bytes(const KeyTile& tile, int64_t size, Ints16 sums[16]) {
  constexpr int K = 16 / R;
  const auto byte_of = [&](int r, int64_t at) {
    const auto* bytes = reinterpret_cast<const int8_t*>(tile.queries + r * tile.query_stride);
    return Ints16{_mm512_loadu_si512(bytes + at)};
  };
  const auto keys_at = [&](int64_t at, int64_t plane, Ints16 keys[K]) {
    const __mmask16 mask = size - at >= 64 ? 0xffff : (1u << (size - at) / 4) - 1;
#pragma GCC unroll 16
    for (int k = 0; k < K; k++) {
      const __m512i words = _mm512_maskz_loadu_epi32(mask, tile.keys[k] + plane * size + at);
      keys[k] = {_mm512_maskz_xor_epi32(mask, words, _mm512_set1_epi8(raised))};
    }
  };
  const auto multiply = [&](const Ints16 keys[K], int64_t at) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Ints16 query = byte_of(r, at);
#pragma GCC unroll 16
      for (int k = 0; k < K; k++) sums[r * K + k] = add_byte_products(keys[k], query, sums[r * K + k]);
    }
  };
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) sums[i] = splat_ints(0);
  Ints16 keys[K];
  for (int64_t at = 0; at < size; at += 64) {
    keys_at(at, 0, keys);
    multiply(keys, at);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) sums[i] = times_256(sums[i]);
  for (int64_t at = 0; at < size; at += 64) {
    keys_at(at, 0, keys);
    multiply(keys, size + at);
    keys_at(at, 1, keys);
    multiply(keys, at);
  }
}

// One plane: Σ key · query over pairs of int16.
template <int R>
static inline void multiply_tile_of_pairs(const KeyTile& tile, int64_t size, Ints16 sums[16]) {
  constexpr int K = 16 / R;
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) sums[i] = splat_ints(0);
  for (int64_t at = 0; at < size; at += 32) {
    const __mmask8 mask = size - at >= 32 ? 0xff : 0xf;  // a head is a multiple of 16
    Ints16 keys[K];
#pragma GCC unroll 16
    for (int k = 0; k < K; k++) {
      keys[k] = {_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi32(mask, tile.keys[k] + at))};
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Ints16 query = load_ints(tile.queries + r * tile.query_stride + at / 2);
#pragma GCC unroll 16
      for (int k = 0; k < K; k++) sums[r * K + k] = add_products(query, keys[k], sums[r * K + k]);
    }
  }
}

// finish(row, column, products) for R queries of those from `row` on and each 16 of n keys, the last one
// repeated.
template <int planes, int R, typename Finish>
static inline void multiply_rows_of_keys(const int32_t* queries, RowView keys, int64_t n, int64_t row,
                                         int64_t size, const Finish& finish) {
  constexpr int K = 16 / R;
  KeyTile tile = {queries + row * integer_query_ints(size), integer_query_ints(size), {}};
  for (int64_t column = 0; column < n; column += 16) {
    __m512i products[R];
#pragma GCC unroll 4
    for (int part = 0; part < R; part++) {
      for (int64_t k = 0; k < K; k++) {
        const int64_t at = column + part * K + k;
        tile.keys[k] = keys.first + (at < n ? at : n - 1) * keys.stride;
      }
      Ints16 sums[16];
      __m512i lanes[16];
      if constexpr (planes == 2) multiply_tile_of_bytes<R>(tile, size, sums);
      if constexpr (planes == 1) multiply_tile_of_pairs<R>(tile, size, sums);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) lanes[i] = sums[i].all;
      products[part] = sum_each_16(lanes).all;
    }
    if constexpr (R == 4) transpose_4x4_128(products);
    if constexpr (R == 2) {
      const __m512i first = _mm512_shuffle_i64x2(products[0], products[1], 0x44);
      products[1] = _mm512_shuffle_i64x2(products[0], products[1], 0xee);
      products[0] = first;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) finish(row + r, column, Ints16{products[r]});
  }
}

// The same for num_rows queries.
template <int planes, typename Finish>
static inline void multiply_keys_in_rows(const int32_t* queries, RowView keys, int64_t n, int64_t num_rows,
                                         int64_t size, const Finish& finish) {
  int64_t row = 0;
  for (; row + 4 <= num_rows; row += 4) {
    multiply_rows_of_keys<planes, 4>(queries, keys, n, row, size, finish);
  }
  if (num_rows - row >= 2) {
    multiply_rows_of_keys<planes, 2>(queries, keys, n, row, size, finish);
    row += 2;
  }
  if (row < num_rows) multiply_rows_of_keys<planes, 1>(queries, keys, n, row, size, finish);
}

// PairOperands<1> but for few queries.
struct WordOperands : PairOperands<1> {
  static constexpr bool has_key_rows = true;

  template <typename Finish>
  static void multiply_key_rows(const int32_t* queries, RowView keys, int64_t n, int64_t num_rows,
                                int64_t size, const Finish& finish) {
    multiply_keys_in_rows<1>(queries, keys, n, num_rows, size, [&](int64_t row, int64_t column, Ints16 sums) {
      finish(row, column, ints_to_floats(sums));
    });
  }
};
