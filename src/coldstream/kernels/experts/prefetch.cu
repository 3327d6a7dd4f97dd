// Copies experts that a later layer will probably choose over the bus, before that layer's router has run;
// see prefetch.py.
#include "experts/bus_copies.cuh"
#include "experts/partition.cuh"

using namespace coldstream;

constexpr int loads_at_once = 16;  // of each lane: enough loads in flight to fill the bus
constexpr int most_guesses = 128;
constexpr uint32_t one_failed = 1u << 16;  // in `arrivals`, above the number of blocks

// The layer whose experts are guessed.
struct Target {
  const int* guesses;  // [num_guesses], the likeliest of each token first; may contain duplicates
  int num_guesses, num_experts;
  uint32_t layer;
  Stack matrix[num_matrices];
  int64_t bytes[num_matrices];  // of an expert
  Prefetched places;
  const MissTimes* times;   // for a single token; null for several
  const uint32_t* reached;  // how many layers of this step have been shared out
  uint32_t* arrivals;  // [places.room.count], blocks that have finished a place; 0 before and after a launch
  int* tallies;        // see PrefetchNotes
};

// How many of the missing experts are copied: as many as there are places, and of a single token no more than
// come in time.
__device__ __forceinline__ int num_copied(const Target& target, int num_missing) {
  const int most = min(num_missing, target.places.room.count);
  return target.times ? min(most, target.times->fetched[num_missing]) : most;
}

// Lists in `chosen` the guessed experts that have no slot, those guessed most often first, as many as are
// copied. Returns their number.
__device__ __forceinline__ int choose_missing(const Target& target, int* missing, int* demand, int* chosen) {
  const int lane = threadIdx.x, num_guesses = target.num_guesses;
  for (int i = lane; i < num_guesses; i += warp_size) {
    const int guess = __ldcg(target.guesses + i);
    bool is_missing = guess >= 0 && guess < target.num_experts;
    if (is_missing) {
      bool has_slot = true;
#pragma unroll
      for (int m = 0; m < num_matrices; m++) has_slot &= target.matrix[m].slots[guess] != 0;
      is_missing = !has_slot;
    }
    missing[i] = is_missing ? guess : -1;
  }
  __syncwarp();
  int num_missing = 0;
  for (int first = 0; first < num_guesses; first += warp_size) {
    const int i = first + lane;
    const int id = i < num_guesses ? missing[i] : -1;
    int uses = 0;
    for (int j = 0; j < num_guesses && id >= 0; j++) {
      uses += missing[j] == id;
      if (j < i && missing[j] == id) {
        uses = 0;
        break;
      }
    }
    if (i < num_guesses) demand[i] = uses;  // 0 but for the first of equals
    num_missing += __popc(__ballot_sync(all_lanes, uses > 0));
  }
  __syncwarp();
  const int count = num_copied(target, num_missing);
  for (int i = lane; i < num_guesses; i += warp_size) {
    if (demand[i] == 0) continue;
    int place = 0;
    for (int j = 0; j < num_guesses; j++) place += demand[j] > demand[i] || (demand[j] == demand[i] && j < i);
    if (place < count) chosen[place] = missing[i];
  }
  __syncwarp();
  return count;
}

// Copies the block's share of words. False if it stopped because the layer's pairs have been shared out in
// the meantime, so that the copy would come too late.
struct CopyShare {
  const uint32_t* reached;
  uint32_t layer;

  template <typename Word>
  __device__ __forceinline__ bool operator()(const Word* from, Word* to, int64_t num_words) const {
    Piece<Word, loads_at_once> piece;
    for (int64_t begin = blockIdx.x * piece.num_words; begin < num_words;
         begin += gridDim.x * piece.num_words) {
      const bool is_too_late = *reinterpret_cast<const volatile uint32_t*>(reached) > layer;
      piece.load(from, begin, num_words);
      if (__any_sync(all_lanes, is_too_late)) return false;
      piece.store(to, begin, num_words);
    }
    return true;
  }
};

// The block's share of all matrices of an expert.
__device__ __forceinline__ bool copy_expert(const Target& target, int id, int place) {
  for (int i = 0; i < num_matrices; i++) {
    const int64_t from = target.matrix[i].mapped + id * target.matrix[i].step;
    const int64_t to = target.places.room.address(place, i);
    if (!copy_as_words(reinterpret_cast<const uint8_t*>(from), reinterpret_cast<uint8_t*>(to),
                       target.bytes[i], CopyShare{target.reached, target.layer}))
      return false;
  }
  return true;
}

// Called by every block once for every chosen expert. The last block to call publishes the expert if all
// blocks have copied their share.
__device__ __forceinline__ void arrive(const Target& target, int id, int place, bool is_whole) {
  __syncwarp();
  if (threadIdx.x != 0) return;
  const uint32_t mine = is_whole ? 1 : 1 + one_failed;
  __threadfence();
  const uint32_t all = atomicAdd(target.arrivals + place, mine) + mine;
  if (all % one_failed < gridDim.x) return;
  target.arrivals[place] = 0;
  if (all != gridDim.x) {
    atomicAdd(target.tallies + num_tallies * target.layer + 2, 1);
    return;
  }
  __threadfence();
  store_release(target.places.keys + place, prefetch_key(target.layer, id));
}

// One warp a block; any number of blocks, each of which copies a share of every chosen expert.
extern "C" __global__ void __launch_bounds__(warp_size)
    prefetch_experts(const __grid_constant__ Target target) {
  __shared__ int missing[most_guesses], demand[most_guesses], chosen[most_guesses];
  const int count = choose_missing(target, missing, demand, chosen);
  bool is_whole = true;
  for (int place = 0; place < count; place++) {
    is_whole = is_whole && copy_expert(target, chosen[place], place);
    arrive(target, chosen[place], place, is_whole);
  }
}
