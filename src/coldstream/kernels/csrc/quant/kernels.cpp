#include "quant/kernels.h"

#include "quant/grid_loads.h"

namespace coldstream {

bool gathers_grid[64] = {};

const QuantKernels& quant_kernels_for(Tier t) {
#if defined(__x86_64__)
  if (t == Tier::avx2) return quant_kernels_avx2;
  if (t == Tier::avx_vnni) return quant_kernels_avx_vnni;
  if (t == Tier::avx512 || t == Tier::amx) {
    static const bool has_chosen = (choose_grid_loads(), true);
    static_cast<void>(has_chosen);
    return t == Tier::avx512 ? quant_kernels_avx512 : quant_kernels_amx;
  }
#elif defined(__aarch64__)
  if (t == Tier::neon) return quant_kernels_neon;
  if (t == Tier::dotprod) return quant_kernels_dotprod;
#endif
  static_cast<void>(t);
  return quant_kernels_generic;
}

}  // namespace coldstream
