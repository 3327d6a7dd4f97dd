#include "quant/kernels.h"

namespace coldstream {

const QuantKernels& quant_kernels_for(Tier t) {
#if defined(__x86_64__)
  if (t == Tier::avx2) return quant_kernels_avx2;
  if (t == Tier::avx_vnni) return quant_kernels_avx_vnni;
  if (t == Tier::avx512) return quant_kernels_avx512;
  if (t == Tier::amx) return quant_kernels_amx;
#elif defined(__aarch64__)
  if (t == Tier::neon) return quant_kernels_neon;
  if (t == Tier::dotprod) return quant_kernels_dotprod;
#endif
  static_cast<void>(t);
  return quant_kernels_generic;
}

}  // namespace coldstream
