// Copies experts that a later layer will probably choose over the bus, before that layer's router has run,
// and tells the CPU which others it will probably compute; see prefetch.py.
#include "experts/bus_copies.cuh"
#include "experts/partition.cuh"

using namespace coldstream;

constexpr int loads_at_once = 16;  // of each lane: enough loads in flight to fill the bus
constexpr int most_guesses = 128;
constexpr uint32_t one_failed = 1u << 16;  // in `arrivals`, above the number of blocks

// The layer whose experts are guessed.
struct Target {
  const int* guesses;  // [num_guesses], the likeliest of each token first; may contain duplicates
  int num_guesses, num_ranks, num_experts;
  uint32_t layer;
  Stack matrix[num_matrices];
  int64_t bytes[num_matrices];  // of an expert
  Prefetched places;
  const int* fetched;       // [most_ranks + 1], how many of so many missing experts are copied
  const uint32_t* reached;  // how many layers of this step have been shared out
  uint32_t* arrivals;  // [places.room.count], blocks that have finished a place; 0 before and after a launch
  int* tallies;        // see PrefetchNotes
};

// How many of the missing experts are copied: as many as there are places, and no more than come in time.
__device__ __forceinline__ int num_copied(const Target& target, int num_missing) {
  return min(target.places.room.count, target.fetched[min(num_missing, most_ranks)]);
}

// What the warp knows of the guesses, by guess.
struct Guesses {
  int missing[most_guesses];  // the expert, if it has no slot and can be copied; −1 for others, and once it
                              // is among the chosen
  int weight[most_guesses];   // of the first guess at a missing expert: `demand` and how likely; 0 for others
};

constexpr int most_tokens = 16;
constexpr int demand_shift = 8;  // of a weight: below is less for a lower rank, and then for a later token
static_assert(most_tokens * most_ranks <= 1 << demand_shift, "of all ranks of all tokens");

__device__ __forceinline__ int demand(int weight) { return weight >> demand_shift; }

struct Counts {
  int missing, copied;
};

// Lists in `chosen` the guessed experts that have no slot and can be copied, those guessed most often first
// and of equals the likeliest, as many as are copied.
__device__ __forceinline__ Counts choose_missing(const Target& target, Guesses& of, int* chosen) {
  const int lane = threadIdx.x, num_guesses = target.num_guesses;
  int *missing = of.missing, *weight = of.weight;
#pragma unroll 1
  for (int i = lane; i < num_guesses; i += warp_size) {
    const int guess = __ldcg(target.guesses + i);
    bool is_missing = guess >= 0 && guess < target.num_experts;
    if (is_missing) {
      bool has_slot = true;
#pragma unroll
      for (int m = 0; m < num_matrices; m++) has_slot &= target.matrix[m].slots[guess] != 0;
      is_missing = !has_slot && target.matrix[0].over_bus(guess) != 0;
    }
    missing[i] = is_missing ? guess : -1;
  }
  __syncwarp();
  int num_missing = 0;
#pragma unroll 1
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
    const int order = i % target.num_ranks * most_tokens + i / target.num_ranks;
    if (i < num_guesses) weight[i] = uses > 0 ? ((uses + 1) << demand_shift) - 1 - order : 0;
    num_missing += __popc(__ballot_sync(all_lanes, uses > 0));
  }
  __syncwarp();
  const int count = num_copied(target, num_missing);
#pragma unroll 1
  for (int i = lane; i < num_guesses; i += warp_size) {
    if (weight[i] == 0) continue;
    int place = 0;
    for (int j = 0; j < num_guesses; j++) place += weight[j] > weight[i];
    if (place >= count) continue;
    chosen[place] = missing[i];
    missing[i] = -1;
  }
  __syncwarp();
  return {num_missing, count};
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
    const int64_t from = target.matrix[i].over_bus(id);
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
  __shared__ Guesses guesses;
  __shared__ int chosen[most_guesses];
  const int count = choose_missing(target, guesses, chosen).copied;
  bool is_whole = true;
  for (int place = 0; place < count; place++) {
    is_whole = is_whole && copy_expert(target, chosen[place], place);
    arrive(target, chosen[place], place, is_whole);
  }
}

// Of several tokens: which of the guessed experts that are not copied the CPU will compute. grid (1): one
// warp. They are those of the fewest tokens, and of equals the highest numbers; see partition.cu. `words` is
// as in Hints.
extern "C" __global__ void __launch_bounds__(warp_size)
    expect_experts(const __grid_constant__ Target target, const MissTimes* times, uint32_t* words) {
  __shared__ Guesses guesses;
  __shared__ int chosen[most_guesses], expected[most_ranks];
  const int lane = threadIdx.x;
  if (lane < most_ranks) expected[lane] = -1;
  const Counts counts = choose_missing(target, guesses, chosen);
  const int most = min(target.num_ranks, times->shared_on_cpu[min(counts.missing, most_ranks)]);
#pragma unroll 1
  for (int i = lane; i < target.num_guesses; i += warp_size) {
    const int id = guesses.missing[i], mine = demand(guesses.weight[i]);
    if (id < 0 || mine == 0) continue;
    int before = 0;
    for (int j = 0; j < target.num_guesses; j++) {
      const int other = demand(guesses.weight[j]);
      if (guesses.missing[j] < 0 || other == 0) continue;
      before += other < mine || (other == mine && guesses.missing[j] > id);
    }
    if (before < most) expected[before] = id;
  }
  __syncwarp();
  if (*reinterpret_cast<const volatile uint32_t*>(target.reached) > target.layer) return;
  const uint32_t word = (target.layer + 1) << 16 | (lane < most_ranks ? expected[lane] + 1 : 0);
  // The CPU looks at the first word, and then at all.
  if (lane > 0 && lane < target.num_ranks) *reinterpret_cast<volatile uint32_t*>(words + lane) = word;
  __threadfence_system();
  __syncwarp();
  if (lane == 0) *reinterpret_cast<volatile uint32_t*>(words) = word;
}
