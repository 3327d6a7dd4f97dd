#include "ops/float_kernels.h"

namespace coldstream {

const float_kernels& float_kernels_for(tier t) {
#if defined(__x86_64__)
  if (t == tier::amx || t == tier::avx512) return float_kernels_avx512;
  if (t == tier::avx2) return float_kernels_avx2;
#endif
  static_cast<void>(t);
  return float_kernels_generic;
}

}  // namespace coldstream
