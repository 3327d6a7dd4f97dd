#include "quant/kernels.h"

namespace coldstream {

const quant_kernels& quant_kernels_for(tier t) {
#if defined(__x86_64__)
  switch (t) {
    case tier::generic:
      return quant_kernels_generic;
    case tier::avx2:
      return quant_kernels_avx2;
    case tier::avx512:
      return quant_kernels_avx512;
    case tier::amx:
      return quant_kernels_amx;
  }
#endif
  static_cast<void>(t);
  return quant_kernels_generic;
}

}  // namespace coldstream
