// One product of 16 x 32 by 32 x 8 bytes, as kernels ask a warp for it; see test_host_products.py.
#include "cuda/tensor_cores.cuh"

using namespace coldstream;

extern __shared__ float4 dynamic_shared[];

// a: int8 [16, 32], b: int8 [8, 32] by columns, d: int32 [16, 8], added to.
template <bool b_is_signed>
__global__ void multiply(const int* a, const int* b, int* d) {
  int* const words = reinterpret_cast<int*>(dynamic_shared);  // [24, 8]
  const int lane = threadIdx.x, row = lane % 8;
  for (int i = lane; i < 192; i += warp_size) words[i] = i < 128 ? a[i] : b[i - 128];
  __syncwarp();
  uint32_t own_a[4], own_b[2];
  load_matrices(own_a, shared_address(words + (lane / 8 % 2 * 8 + row) * 8 + lane / 16 * 4));
  load_two_matrices(own_b, shared_address(words + (16 + row) * 8 + lane / 8 % 2 * 4));
  int* const first = d + lane / 4 * 8 + lane % 4 * 2;
  int sums[4] = {first[0], first[1], first[64], first[65]};
  if (b_is_signed)
    add_product(sums, own_a, own_b[0], own_b[1]);
  else
    add_product_of_unsigned(sums, own_a, own_b[0], own_b[1]);
  for (int i = 0; i < 4; i++) first[i / 2 * 64 + i % 2] = sums[i];
}
