// Operands of attention over two planes as bytes for vpdpbusd, four channels or four positions a lane: three
// instructions for what pairs of int16 take four for. The instruction takes unsigned by signed bytes, so keys
// and values are 128 greater than they are, and 128 times what they met is taken off each sum.

// sum + the products of the four unsigned bytes of a lane and the four signed ones. As an instruction for the
// reason that add_products is one.
static inline ints16 add_byte_products(ints16 bytes, ints16 factors, ints16 sum) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.all) : "v"(bytes.all), "v"(factors.all));
  return sum;
}

static inline ints16 raise_bytes(ints16 bytes) {
  return {_mm512_xor_si512(bytes.all, _mm512_set1_epi8(-128))};
}

// Sixteen words of keys from `word` on, of which a plane has num_words; those behind are 0.
static inline ints16 load_words(const int8_t* plane, int64_t word, int64_t num_words) {
  const __mmask16 mask = num_words - word >= 16 ? 0xffff : (1u << (num_words - word)) - 1;
  return {_mm512_maskz_loadu_epi32(mask, plane + 4 * word)};
}

// Sums of one tile, R rows and V vectors of columns; see multiply_integers. The low plane of `a` lies a_low
// ints behind its high one, that of `b` b_low rows; row r's correction is a[r, correction].
struct byte_product {
  const int32_t* a;
  int64_t a_stride, a_low, correction;
  const int32_t* b;
  int64_t b_stride, b_low, num_rows, n;
};

template <int R, int V, typename Finish>
static inline void multiply_byte_rows(const byte_product& p, int64_t row, int64_t column,
                                      const Finish& finish) {
  for (; row + R <= p.num_rows; row += R) {
    ints16 highs[R][V], others[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) highs[r][v] = others[r][v] = splat_ints(0);
    }
    for (int64_t i = 0; i < p.n; i++) {
      ints16 high[V], low[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        high[v] = load_ints(p.b + i * p.b_stride + column + 16 * v);
        low[v] = load_ints(p.b + (p.b_low + i) * p.b_stride + column + 16 * v);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const int32_t* factors = p.a + (row + r) * p.a_stride + i;
        const ints16 high_factor = splat_ints(factors[0]), low_factor = splat_ints(factors[p.a_low]);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
          highs[r][v] = add_byte_products(high[v], high_factor, highs[r][v]);
          others[r][v] = add_byte_products(low[v], high_factor, others[r][v]);
          others[r][v] = add_byte_products(high[v], low_factor, others[r][v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const ints16 correction = splat_ints(p.a[(row + r) * p.a_stride + p.correction]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        const ints16 sum = add_ints(times_256(highs[r][v]), others[r][v]);
        finish(row + r, column + 16 * v, ints_to_floats(sub_ints(sum, correction)));
      }
    }
  }
  if constexpr (R > 1) multiply_byte_rows<R / 2, V>(p, row, column, finish);
}

// What pair_operands<2> is for pairs: a row of n numbers is the high bytes, the low bytes and the correction;
// keys are [2, size / 4, ATTENTION_BLOCK] and values [2, ATTENTION_BLOCK / 4, size].
struct byte_operands {
  static constexpr int64_t query_scale(int64_t size) { return size / 2 + 1; }

  static float round(const float* x, int64_t n, int32_t* out) {
    const plane_scale to = scale_two_planes(x, n);
    auto* bytes = reinterpret_cast<int8_t*>(out);
    __m512i sum = _mm512_setzero_si512();  // of 257 · high + low
    for (int64_t i = 0; i < n; i += 16) {
      const ints16 codes = codes_of(x + i, to.factor), high = high_of(codes);
      store_bytes(bytes + i, high);
      store_bytes(bytes + n + i, sub_ints(codes, times_256(high)));
      sum = _mm512_add_epi32(sum, add_ints(codes, high).all);
    }
    out[n / 2] = 128 * _mm512_reduce_add_epi32(sum);
    return to.scale * (1.0f / 256);
  }

  static void pack_keys(const int8_t* keys, int64_t stride, int64_t n, int64_t size, int32_t* packed) {
    const int64_t num_words = size / 4;
    for (int64_t plane = 0; plane < 2; plane++, keys += size, packed += num_words * ATTENTION_BLOCK) {
      for (int64_t position = 0; position < n; position += 16) {
        for (int64_t i = 0; i < num_words; i += 16) {
          vec16 square[16];
          for (int64_t p = 0; p < 16; p++) {
            const int64_t at = position + p < n ? position + p : n - 1;
            square[p] = floats_of_bits(raise_bytes(load_words(keys + at * stride, i, num_words)));
          }
          transpose16(square);
          for (int64_t j = 0; j < 16 && i + j < num_words; j++) {
            store_ints(packed + (i + j) * ATTENTION_BLOCK + position, bits_of_floats(square[j]));
          }
        }
      }
    }
  }

  static void pack_values(const int8_t* values, int64_t stride, int64_t n, int64_t size, int32_t* packed) {
    // A row's words are first put where the unpacking of bytes, in each quarter of a register, takes them from.
    const __m512i quarters = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t plane = 0; plane < 2; plane++, values += size) {
      int32_t* out = packed + plane * (ATTENTION_BLOCK / 4) * size;
      for (int64_t p = 0; p < n; p += 4) {
        for (int64_t i = 0; i < size; i += 64) {
          __m512i rows[4];
          for (int64_t j = 0; j < 4; j++) {
            const int64_t at = p + j < n ? p + j : n - 1;  // meets a weight of 0
            const ints16 words = load_words(values + at * stride, i / 4, size / 4);
            rows[j] = _mm512_permutexvar_epi32(quarters, raise_bytes(words).all);
          }
          const __m512i low01 = _mm512_unpacklo_epi8(rows[0], rows[1]);
          const __m512i low23 = _mm512_unpacklo_epi8(rows[2], rows[3]);
          const __m512i up01 = _mm512_unpackhi_epi8(rows[0], rows[1]);
          const __m512i up23 = _mm512_unpackhi_epi8(rows[2], rows[3]);
          const __m512i lanes[4] = {_mm512_unpacklo_epi16(low01, low23), _mm512_unpackhi_epi16(low01, low23),
                                    _mm512_unpacklo_epi16(up01, up23), _mm512_unpackhi_epi16(up01, up23)};
          for (int64_t v = 0; v < 4 && i + 16 * v < size; v++, out += 16) store_ints(out, {lanes[v]});
        }
      }
    }
  }

  template <typename Finish>
  static void multiply_keys(const int32_t* queries, const int32_t* keys, int64_t num_rows,
                            int64_t num_columns, int64_t size, const Finish& finish) {
    const int64_t words = size / 4;
    multiply({queries, integer_query_ints(size), words, 2 * words, keys, ATTENTION_BLOCK, words, num_rows,
              words},
             num_columns, finish);
  }

  template <typename Finish>
  static void multiply_values(const int32_t* weights, const int32_t* values, int64_t num_rows, int64_t n,
                              int64_t size, const Finish& finish) {
    constexpr int64_t words = ATTENTION_BLOCK / 4;
    multiply({weights, ATTENTION_BLOCK, words, 2 * words, values, size, words, num_rows, (n + 3) / 4}, size,
             finish);
  }

  template <typename Finish>
  static void multiply(const byte_product& product, int64_t num_columns, const Finish& finish) {
    int64_t column = 0;
    for (; column + 32 <= num_columns; column += 32) multiply_byte_rows<4, 2>(product, 0, column, finish);
    for (; column < num_columns; column += 16) multiply_byte_rows<4, 1>(product, 0, column, finish);
  }
};
