#include "quant/grid_loads.h"

#if defined(__AVX512VNNI__)

#include <algorithm>
#include <chrono>

#include "quant/grid_avx512.h"

namespace coldstream {

namespace {

constexpr int num_blocks = 16, num_loads = 128, num_turns = 5;

template <QuantType Q>
void choose() {
  using Block = typename Traits<Q>::Block;
  alignas(64) uint8_t bytes[num_blocks * sizeof(Block)];
  uint32_t state = 1;
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((state = state * 1664525 + 1013904223) >> 24);
  const auto* blocks = reinterpret_cast<const Block*>(bytes);
  __m512i sum = _mm512_setzero_si512();
  const auto seconds = [&](auto&& load) __attribute__((always_inline)) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < num_loads; i++) {
      __m512i codes[4];
      load(blocks + i % num_blocks, codes);
      sum = _mm512_xor_si512(_mm512_xor_si512(sum, codes[0]), _mm512_xor_si512(codes[1], codes[2]));
      sum = _mm512_xor_si512(sum, codes[3]);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  double permuted = 1, gathered = 1;
  for (int turn = 0; turn < num_turns; turn++) {
    permuted = std::min(permuted, seconds([](auto* b, auto& out) { permute_eights<Q>(b, out); }));
    gathered = std::min(gathered, seconds([](auto* b, auto& out) { gather_eights<Q>(b, out); }));
  }
  // The sum is used, so that no load is left out.
  volatile int64_t used = _mm512_reduce_add_epi64(sum);
  static_cast<void>(used);
  gathers_grid[static_cast<int>(Q)] = gathered < permuted;
}

}  // namespace

void choose_grid_loads() {
  choose<QuantType::iq2_xxs>();
  choose<QuantType::iq2_xs>();
  choose<QuantType::iq2_s>();
}

}  // namespace coldstream

#endif
