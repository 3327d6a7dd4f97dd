#include "quant/kernels.h"

namespace coldstream {

const QuantKernels& quant_kernels_for(Tier t) {
#if defined(__x86_64__)
  switch (t) {
    case Tier::generic:
      return quant_kernels_generic;
    case Tier::avx2:
      return quant_kernels_avx2;
    case Tier::avx_vnni:
      return quant_kernels_avx_vnni;
    case Tier::avx512:
      return quant_kernels_avx512;
    case Tier::amx:
      return quant_kernels_amx;
  }
#endif
  static_cast<void>(t);
  return quant_kernels_generic;
}

}  // namespace coldstream
