// Products of super-blocks with at most eight activation rows by VNNI, for types whose sums over a quarter of
// a sub-block's inputs fit an int16.
//
// Here a tile has its rows in quarters of four: a register has 16 inputs of each of four rows, so that four
// lanes share the sum of a sub-block. The sums of two sub-blocks are packed to int16 and multiplied by both
// scales at once, where int32 would take three instructions for each of them. The totals of four weight rows
// then meet in one register, whose lanes 4t … 4t + 3 are those weight rows with activation row t.
#include "quant/gemm_quarters.h"

#if defined(__AVX512VNNI__)

#include <cstddef>

#include "quant/dispatch.h"
#include "quant/gemm_512.h"

namespace coldstream {

namespace {

// Types that gain by it. Those of grids do not: their codes take most of the time.
template <QuantType Q>
inline constexpr bool takes_quarters = Q == QuantType::q4_k || Q == QuantType::q5_k || Q == QuantType::q6_k;

inline __attribute__((always_inline)) __m512i broadcast_16(const void* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}

// Each of four lanes four times.
inline __attribute__((always_inline)) __m512i spread_four(const void* four) {
  const __m512i index = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_epi32(index,
                                  _mm512_castsi128_si512(_mm_load_si128(static_cast<const __m128i*>(four))));
}

template <QuantType Q>
struct KernelQuarters {
  using T = Traits<Q>;
  using Panel = PanelQuarters;
  static constexpr int num_spans = 256 / T::sub_block, steps = T::sub_block / 16;
  // The first bytes of a block, which are decoded for four rows at a time.
  static constexpr bool has_k4_head = T::has_mins;
  // Two sub-blocks whose codes are the nibbles of the same bytes; these are read where they are.
  static constexpr bool has_nibbles = Q == QuantType::q4_k;
  static_assert(std::max(T::offset, T::greatest - T::offset) * 127 * T::sub_block / 4 <= 32767);

  static void load(Panel& to, int row, const typename T::Block* b) {
    if constexpr (has_k4_head) to.blocks[row] = b->d;
    if constexpr (!has_nibbles) {
      const Codes512 codes = load_codes<Q>(b);
      for (int k = 0; k < 4; k++) _mm512_store_si512(to.codes[row] + 64 * k, codes.part[k]);
    }
    if constexpr (!has_k4_head) {
      const __m512i packed = _mm512_castsi256_si512(widen(T::scales(*b)));
      for (int half = 0; half < num_spans / 8; half++) {
        const __m512i index =
            _mm512_add_epi16(each_four_times(), _mm512_set1_epi16(static_cast<short>(8 * half)));
        _mm512_store_si512(to.scales[row][4 * half], _mm512_permutexvar_epi16(index, packed));
      }
      to.half_d[row] = T::half_d(*b);
    }
  }

  // Of 16-bit lanes 0, 1 …
  static inline __attribute__((always_inline)) __m512i each_four_times() {
    return _mm512_set_epi16(7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1,
                            1, 0, 0, 0, 0);
  }

  static void clear(Panel& to, int row) {
    static constexpr typename T::Block empty = {};
    to.blocks[row] = reinterpret_cast<const uint8_t*>(&empty);
    std::memset(to.codes[row], 0, sizeof to.codes[row]);
    std::memset(to.scales[row], 0, sizeof to.scales[row]);
    to.half_d[row] = 0;
  }

  // What the blocks of all rows have beside their codes.
  static void load_heads(Panel& w) {
    for (int i = 0; i < panel_rows / 4; i++) {
      if constexpr (has_k4_head) {
        load_k4_heads(w, i);
      } else {
        const __m128 d = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w.half_d + 4 * i)));
        _mm_store_ps(w.d[i], T::d_factor == 1.0f ? d : _mm_mul_ps(d, _mm_set1_ps(T::d_factor)));
      }
    }
  }

  // The same as `unpack_scales_k4`, of four blocks.
  static inline __attribute__((always_inline)) void load_k4_heads(Panel& w, int i) {
    const auto head = [&](int r) __attribute__((always_inline)) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(w.blocks[4 * i + r]));
    };
    const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(head(0)), head(1), 1);
    const __m512i heads = _mm512_inserti32x4(_mm512_inserti32x4(two, head(2), 2), head(3), 3);
    const auto each = [](int a, int b, int c, int d) __attribute__((always_inline)) {
      return _mm512_broadcast_i32x4(_mm_setr_epi32(a, b, c, d));
    };
    const __m512i six = _mm512_srlv_epi32(_mm512_shuffle_epi32(heads, _MM_PERM_CCBB), each(0, 2, 0, 2));
    const __m512i four = _mm512_srlv_epi32(_mm512_shuffle_epi32(heads, _MM_PERM_DDDD), each(0, 0, 0, 4));
    constexpr int select = 0xea;  // a & b | c
    // Of each block: eight scales, then eight minimums.
    const __m512i bytes =
        _mm512_ternarylogic_epi32(six, each(0x3f3f3f3f, 0x30303030, 0x3f3f3f3f, 0x30303030),
                                  _mm512_and_si512(four, each(0, 0x0f0f0f0f, 0, 0x0f0f0f0f)), select);
    constexpr __mmask64 even = 0x5555555555555555;
    for (int r = 0; r < 4; r++) {
      const __m512i index =
          _mm512_add_epi16(each_four_times(), _mm512_set1_epi16(static_cast<short>(16 * r)));
      _mm512_store_si512(w.scales[4 * i + r], _mm512_maskz_permutexvar_epi8(even, index, bytes));
    }
    // Minimums 2k and 2k + 1 of row r are at 16 r + 8 + 2 k.
    const __m512i rows = _mm512_broadcast_i32x4(_mm_setr_epi32(0x090008, 0x190018, 0x290028, 0x390038));
    const __m512i pairs = _mm512_setr_epi32(0, 0, 0, 0, 0x20002, 0x20002, 0x20002, 0x20002, 0x40004, 0x40004,
                                            0x40004, 0x40004, 0x60006, 0x60006, 0x60006, 0x60006);
    _mm512_store_si512(w.mins[i], _mm512_maskz_permutexvar_epi8(even, _mm512_add_epi32(rows, pairs), bytes));
    const __m512i halves = _mm512_castsi128_si512(_mm_setr_epi16(0, 8, 16, 24, 1, 9, 17, 25));
    const __m256 d = _mm256_cvtph_ps(_mm512_castsi512_si128(_mm512_permutexvar_epi16(halves, heads)));
    _mm_store_ps(w.d[i], _mm256_castps256_ps128(d));
    _mm_store_ps(w.dmin[i], _mm256_extractf128_ps(d, 1));
  }

  static void multiply(Panel& w, const ActivationTile* x, int64_t /*stride*/, int num_rows, int64_t g,
                       int /*num_blocks*/, Accumulators* p) {
    load_heads(w);
    if (num_rows <= quarter_rows) {
      multiply_quarters<1>(w, *x, g, *p);
    } else {
      multiply_quarters<2>(w, *x, g, *p);
    }
  }

  static __m512i inputs_of(const ActivationTile& x, int quarter, int step) {
    return _mm512_load_si512(x.q[0][0] + (quarter * 16 + step) * 64);
  }

  template <int quarters>
  static void multiply_quarters(Panel& w, const ActivationTile& x, int64_t g, Accumulators& p) {
    fill_starts<quarters>(w, x);
    __m512 a[quarters];
    __m512i sums[quarters][4];
    for (int t = 0; t < quarters; t++) {
      a[t] = _mm512_castsi512_ps(spread_four(x.scales + quarter_rows * t));
      for (int k = 0; k < 4; k++) sums[t][k] = spread_four(x.sums_32[k][quarter_rows * t]);
    }
    for (int i = 0; i < panel_rows / 4; i++) {
      w.ahead.prefetch<Q>(4 * i, 4);
      __m512i total[4][quarters];
      sum_super_blocks<quarters>(w, x, 4 * i, total);
      for (int t = 0; t < quarters; t++) {
        const __m512i of_quarter[4] = {total[0][t], total[1][t], total[2][t], total[3][t]};
        add_totals(w, i, sum_fours(of_quarter), a[t], sums[t], g < 8, p.lane[g % 8][8 * t + i]);
      }
    }
  }

  template <int quarters>
  static void fill_starts(Panel& w, const ActivationTile& x) {
    if constexpr (T::offset != 0) {
      const __m512i offset = _mm512_set1_epi8(T::offset);
      for (int t = 0; t < quarters; t++) {
        for (int j = 0; j < num_spans; j++) {
          __m512i sum = _mm512_setzero_si512();
          for (int i = 0; i < steps; i++)
            sum = _mm512_dpbusd_epi32(sum, offset, inputs_of(x, t, j * steps + i));
          _mm512_store_si512(w.starts[t][j], _mm512_sub_epi32(_mm512_setzero_si512(), sum));
        }
      }
    }
  }

  // 16 codes of sub-blocks 2k and 2k + 1 of a weight row, four times.
  static inline __attribute__((always_inline)) void load_pair(const Panel& w, int n, int k, int step,
                                                              __m512i& even, __m512i& odd) {
    if constexpr (has_nibbles) {
      const __m512i both = broadcast_16(w.blocks[n] + offsetof(BlockQ4_K, qs) + 32 * k + 16 * step),
                    nibble = _mm512_set1_epi8(15);
      even = _mm512_and_si512(both, nibble);
      odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    } else {
      const uint8_t* codes = w.codes[n] + 2 * k * T::sub_block + 16 * step;
      even = broadcast_16(codes);
      odd = broadcast_16(codes + T::sub_block);
    }
  }

  template <int quarters>
  static inline __attribute__((always_inline)) void sum_super_blocks(const Panel& w, const ActivationTile& x,
                                                                     int n, __m512i (&total)[4][quarters]) {
    constexpr int rows = 4;
    for (int r = 0; r < rows; r++) {
      for (int t = 0; t < quarters; t++) total[r][t] = _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int k = 0; k < num_spans / 2; k++) {
      __m512i even[rows][quarters], odd[rows][quarters];
      for (int r = 0; r < rows; r++) {
        for (int t = 0; t < quarters; t++) {
          even[r][t] = T::offset == 0 ? _mm512_setzero_si512() : _mm512_load_si512(w.starts[t][2 * k]);
          odd[r][t] = T::offset == 0 ? _mm512_setzero_si512() : _mm512_load_si512(w.starts[t][2 * k + 1]);
        }
      }
#pragma GCC unroll 2
      for (int i = 0; i < steps; i++) {
        __m512i first[quarters], second[quarters];
        for (int t = 0; t < quarters; t++) {
          first[t] = inputs_of(x, t, 2 * k * steps + i);
          second[t] = inputs_of(x, t, (2 * k + 1) * steps + i);
        }
        for (int r = 0; r < rows; r++) {
          __m512i low, high;
          load_pair(w, n + r, k, i, low, high);
          for (int t = 0; t < quarters; t++) {
            even[r][t] = _mm512_dpbusd_epi32(even[r][t], low, first[t]);
            odd[r][t] = _mm512_dpbusd_epi32(odd[r][t], high, second[t]);
          }
        }
      }
      for (int r = 0; r < rows; r++) {
        const __m512i scales = broadcast_16(w.scales[n + r][k]);
        for (int t = 0; t < quarters; t++)
          total[r][t] = _mm512_dpwssd_epi32(total[r][t], _mm512_packs_epi32(even[r][t], odd[r][t]), scales);
      }
    }
  }

  // Sums over lanes: of each four lanes of four registers, transposed.
  static inline __attribute__((always_inline)) __m512i sum_fours(const __m512i (&v)[4]) {
    const auto add_halves = [](__m512i a, __m512i b) __attribute__((always_inline)) {
      return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)));
    };
    const __m512 low = add_halves(v[0], v[1]), high = add_halves(v[2], v[3]);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(low, high, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0xdd)));
  }

  // The sums of four weight rows with a quarter to accumulators p.
  static inline __attribute__((always_inline)) void add_totals(const Panel& w, int i, __m512i dot, __m512 a,
                                                               const __m512i (&sums)[4], bool is_first,
                                                               float* p) {
    const auto scale = [&](const float* d) __attribute__((always_inline)) {
      return _mm512_mul_ps(_mm512_castsi512_ps(broadcast_16(d)), a);
    };
    __m512 sum = is_first ? _mm512_setzero_ps() : _mm512_load_ps(p);
    sum = _mm512_fmadd_ps(scale(w.d[i]), _mm512_cvtepi32_ps(dot), sum);
    if constexpr (T::has_mins) {
      __m512i min_dot = _mm512_setzero_si512();
      for (int k = 0; k < 4; k++) min_dot = _mm512_dpwssd_epi32(min_dot, sums[k], broadcast_16(w.mins[i][k]));
      sum = _mm512_fnmadd_ps(scale(w.dmin[i]), _mm512_cvtepi32_ps(min_dot), sum);
    }
    _mm512_store_ps(p, sum);
  }

  static void store(const Accumulators& p, int num_lanes, int num_rows, float* const* out, int64_t n) {
    for (int t = 0; t < tile_rows && out[t] != nullptr; t += quarter_rows)
      store_quarter(p, num_lanes, 2 * t, num_rows, out + t, n);
  }

  static void store_quarter(const Accumulators& p, int num_lanes, int first, int num_rows, float* const* out,
                            int64_t n) {
    for (int i = 0; i < panel_rows / 4 && 4 * i < num_rows; i += 4) {
      __m512i of_row[4];
      for (int j = 0; j < 4; j++) of_row[j] = sum_accumulators_at(p, first + i + j, num_lanes);
      transpose_4x4_128(of_row);
      const int rest = num_rows - 4 * i;
      const auto present = static_cast<__mmask16>(rest >= 16 ? 0xffff : (1 << rest) - 1);
      for (int t = 0; t < quarter_rows && out[t] != nullptr; t++)
        _mm512_mask_storeu_epi32(out[t] + n + 4 * i, present, of_row[t]);
    }
  }
};

}  // namespace

int quarters_min_rows(QuantType type) {
  int found = narrow_tile_rows + 1;
  dispatch_integer(type, [&]<QuantType Q>() {
    if constexpr (takes_quarters<Q>) found = Q == QuantType::q4_k ? 3 : 7;
  });
  return found;
}

bool gemm_quarters(const WeightRows& w, const ActivationTile* x, int num_tiles, float* const* out,
                   std::byte* memory) {
  if (present_rows(out, num_tiles * tile_rows) > narrow_tile_rows) return false;
  bool is_done = false;
  dispatch_integer(w.type, [&]<QuantType Q>() {
    if constexpr (takes_quarters<Q>) {
      gemm_of_type<Q, KernelQuarters<Q>>(w, x, num_tiles, out, memory);
      is_done = true;
    }
  });
  return is_done;
}

}  // namespace coldstream

#endif
