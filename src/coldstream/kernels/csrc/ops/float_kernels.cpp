#include "ops/float_kernels.h"

namespace coldstream {

#if defined(__x86_64__)
namespace {

// Composed here, as code that is compiled for a tier must not run before the CPU is known to have it.
FloatKernels with_tiles() {
  FloatKernels kernels = float_kernels_avx512;
  for (int i = 0; i < num_integer_cache_types; i++) {
    kernels.caches[static_cast<int>(CacheType::i16) + i] = integer_cache_kernels_amx[i];
  }
  return kernels;
}

}  // namespace
#endif

const FloatKernels& float_kernels_for(Tier t) {
#if defined(__x86_64__)
  if (t == Tier::amx) {
    static const FloatKernels kernels = with_tiles();
    return kernels;
  }
  if (t == Tier::avx512) return float_kernels_avx512;
  if (t == Tier::avx2 || t == Tier::avx_vnni) return float_kernels_avx2;
#elif defined(__aarch64__)
  if (t == Tier::neon || t == Tier::dotprod) return float_kernels_neon;
#endif
  static_cast<void>(t);
  return float_kernels_generic;
}

}  // namespace coldstream
