// Copies the experts of a layer that a step of several tokens reads over the bus to places on the device; see
// stage.py.
#include "experts/bus_copies.cuh"
#include "experts/partition.cuh"

using namespace coldstream;

constexpr int loads_at_once = 8;  // of each lane
constexpr int64_t piece_bytes = loads_at_once * warp_size * sizeof(uint4);

struct StagedLayer {
  Stack matrix[num_matrices];
  int64_t bytes[num_matrices];  // of an expert
  Staging staging;
};

struct CopyWords {
  template <typename Word>
  __device__ __forceinline__ bool operator()(const Word* from, Word* to, int64_t num_words) const {
    Piece<Word, loads_at_once> piece;
#pragma unroll 1
    for (int64_t begin = 0; begin < num_words; begin += piece.num_words) {
      piece.load(from, begin, num_words);
      piece.store(to, begin, num_words);
    }
    return true;
  }
};

// Piece `index` of the expert in `place`: of gate, then of up, then of down.
__device__ __forceinline__ void copy_piece(const StagedLayer& staged, int place, int64_t index) {
  const int id = staged.staging.list[1 + place];
#pragma unroll
  for (int i = 0; i < num_matrices; i++) {
    const int64_t bytes = staged.bytes[i], at = index * piece_bytes;
    if (at >= 0 && at < bytes) {
      const int64_t from = staged.matrix[i].over_bus(id) + at;
      const int64_t to = staged.staging.room.address(place, i) + at;
      copy_as_words(reinterpret_cast<const uint8_t*>(from), reinterpret_cast<uint8_t*>(to),
                    min(piece_bytes, bytes - at), CopyWords());
    }
    index -= (bytes + piece_bytes - 1) / piece_bytes;
  }
}

// One warp a block, any number of blocks, which take pieces of all experts in turn.
extern "C" __global__ void __launch_bounds__(warp_size)
    stage_experts(const __grid_constant__ StagedLayer staged) {
  release_next_grid();
  wait_for_previous_grid();
  int64_t pieces = 0;  // of an expert
#pragma unroll
  for (int i = 0; i < num_matrices; i++) pieces += (staged.bytes[i] + piece_bytes - 1) / piece_bytes;
  const int64_t all = pieces * staged.staging.list[0];
#pragma unroll 1
  for (int64_t piece = blockIdx.x; piece < all; piece += gridDim.x) {
    const int place = int(piece / pieces);
    copy_piece(staged, place, piece - place * pieces);
  }
}
