// Planes of bytes for instructions that multiply four of them a lane: rows of queries and of weights as two
// planes, and the keys and values of a block as words of four bytes of one plane, which are four channels of
// a key or four positions of a value. Every byte of keys and values is taken exclusive or `flip`.

struct RoundedBytes {
  float scale;  // over 256
  int32_t sum;  // of 257 · high + low
};

// Numbers [n], a multiple of 16 → their n high bytes, then their n low ones.
static inline RoundedBytes round_bytes(const float* x, int64_t n, int8_t* out) {
  const PlaneScale to = scale_two_planes(x, n);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 16) {
    const Ints16 codes = codes_of(x + i, to.factor), high = high_of(codes);
    store_bytes(out + i, high);
    store_bytes(out + n + i, sub_ints(codes, times_256(high)));
    sum = _mm512_add_epi32(sum, add_ints(codes, high).all);
  }
  return {to.scale * (1.0f / 256), _mm512_reduce_add_epi32(sum)};
}

static inline Ints16 flip_bytes(Ints16 bytes, int8_t flip) {
  return {_mm512_xor_si512(bytes.all, _mm512_set1_epi8(flip))};
}

// Sixteen words of a plane from `word` on, of which it has num_words; those behind are 0.
static inline Ints16 load_words(const int8_t* plane, int64_t word, int64_t num_words) {
  const __mmask16 mask = num_words - word >= 16 ? 0xffff : (1u << (num_words - word)) - 1;
  return {_mm512_maskz_loadu_epi32(mask, plane + 4 * word)};
}

// keys [n] → [planes, num_rows, attention_block] words, rows from size / 4 on, less than 16 of them, `flip`
// in every byte and positions from n on undefined.
template <int planes>
static inline void pack_key_words(const int8_t* keys, int64_t stride, int64_t n, int64_t size,
                                  int64_t num_rows, int8_t flip, int32_t* packed) {
  for (int64_t plane = 0; plane < planes; plane++, keys += size, packed += num_rows * attention_block) {
    for (int64_t position = 0; position < n; position += 16) {
      for (int64_t i = 0; i < size / 4; i += 16) {
        Vec16 square[16];
        for (int64_t p = 0; p < 16; p++) {
          const int64_t at = position + p < n ? position + p : n - 1;
          square[p] = floats_of_bits(flip_bytes(load_words(keys + at * stride, i, size / 4), flip));
        }
        transpose16(square);
        for (int64_t j = 0; j < 16 && i + j < num_rows; j++) {
          store_ints(packed + (i + j) * attention_block + position, bits_of_floats(square[j]));
        }
      }
    }
  }
}

// values [n] → [planes, attention_block / 4, size] words, those of positions from n on undefined.
template <int planes>
static inline void pack_value_words(const int8_t* values, int64_t stride, int64_t n, int64_t size,
                                    int8_t flip, int32_t* packed) {
  // A row's words are first put where the unpacking of bytes, in each quarter of a register, takes them from.
  const __m512i quarters = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t plane = 0; plane < planes; plane++, values += size) {
    int32_t* out = packed + plane * (attention_block / 4) * size;
    for (int64_t p = 0; p < n; p += 4) {
      for (int64_t i = 0; i < size; i += 64) {
        __m512i rows[4];
        for (int64_t j = 0; j < 4; j++) {
          const int64_t at = p + j < n ? p + j : n - 1;  // meets a weight of 0
          const Ints16 words = load_words(values + at * stride, i / 4, size / 4);
          rows[j] = _mm512_permutexvar_epi32(quarters, flip_bytes(words, flip).all);
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
