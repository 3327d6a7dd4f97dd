#if defined(__aarch64__)

#include "quant/dequantize.h"
#include "quant/gemm_neon.h"
#include "quant/gemv_neon.h"
#include "quant/rows_neon.h"

namespace coldstream {

constinit const QuantKernels quant_kernels_dotprod = {
#include "quant/neon_table.inl"
};

}  // namespace coldstream

#endif
