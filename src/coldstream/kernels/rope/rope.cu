// Rope angles of rows, from a table of all positions; see cuda.py for the launcher.
#include "cuda/common.cuh"

using namespace coldstream;

// grid (ceil(rows · half / block)); table [positions, half] of (cos, sin). A row of no sequence, at position
// −1, gets those of position 0.
__global__ void gather_angles(const float2* table, const int* positions, int num_rows, int half,
                              float2* angles) {
  wait_for_previous_grid();
  release_next_grid();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = i / half;
  if (row < num_rows) angles[i] = table[int64_t(max(positions[row], 0)) * half + i % half];
}
