// The float kernels of a tier whose attention over integers multiplies pairs of int16.

// Accumulators of a product: tile_rows × tile_vectors vectors, of two or four registers.
constexpr int tile_rows = 4, tile_vectors = 1, delta_vectors = 1, delta_chains = 2, step_vectors = 2;

#include "ops/float_tier.inl"

using OnePlane = PairOperands<1>;
using TwoPlanes = PairOperands<2>;
