#include "ops/float_kernels.h"

namespace coldstream {

#if defined(__x86_64__)
namespace {

// Composed here, as code that is compiled for a tier must not run before the CPU is known to have it.
float_kernels with_tiles() {
  float_kernels kernels = float_kernels_avx512;
  for (int i = 0; i < NUM_INTEGER_CACHE_TYPES; i++) {
    kernels.caches[static_cast<int>(cache_type::i16) + i] = integer_cache_kernels_amx[i];
  }
  return kernels;
}

}  // namespace
#endif

const float_kernels& float_kernels_for(tier t) {
#if defined(__x86_64__)
  if (t == tier::amx) {
    static const float_kernels kernels = with_tiles();
    return kernels;
  }
  if (t == tier::avx512) return float_kernels_avx512;
  if (t == tier::avx2) return float_kernels_avx2;
#endif
  static_cast<void>(t);
  return float_kernels_generic;
}

}  // namespace coldstream
