// Copies rows of activations: the floats, codes, scales and sums of each; see copy_rows.py.
#include "cuda/common.cuh"

using namespace coldstream;

// In words of four bytes.
struct CopiedPart {
  const uint32_t* source;
  uint32_t* target;
  int row_words;
};

struct CopiedParts {
  CopiedPart at[4];
};

// grid (rows, 4), 512 threads. first: the row of the source for row 0, null for 0.
__global__ void __launch_bounds__(512)
    copy_rows(const __grid_constant__ CopiedParts parts, const int* first) {
  wait_for_previous_grid();
  release_next_grid();
  const CopiedPart& part = parts.at[blockIdx.y];
  const int64_t row = blockIdx.x, source_row = row + (first != nullptr ? *first : 0);
  const uint32_t* source = part.source + source_row * part.row_words;
  uint32_t* target = part.target + row * part.row_words;
  for (int i = threadIdx.x; i < part.row_words; i += blockDim.x) target[i] = source[i];
}
