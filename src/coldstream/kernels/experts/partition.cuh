// Chooses the place of each expert that a step's tokens chose: a slot, host memory over the bus, or the CPU,
// which gets its pairs through the mailbox. See partition.py.
#pragma once

#include "cuda/answer.cuh"

namespace coldstream {

constexpr int num_matrices = 3;  // gate, up, down
constexpr int num_tallies = 3;
constexpr int most_rows = 64;
constexpr int most_ranks = 16;

// One matrix of a layer's experts: addresses of slots by expert (0: none), and where the device reads those
// without a slot over the bus.
struct Stack {
  const int64_t* slots;
  const int64_t* pooled;  // by expert in a pool in RAM (0: it cannot be read); null: the file is mapped
  int64_t mapped;         // the device's address of the mapping, or 0
  int64_t step;           // bytes from expert to expert of the mapping

  // 0 if the device cannot read it.
  __device__ __forceinline__ int64_t over_bus(int id) const {
    if (pooled != nullptr) return pooled[id];
    return mapped != 0 ? mapped + id * step : 0;
  }
};

// By expert that was chosen: addresses of its matrices for the GPU (0: the CPU computes it); by pair: the
// expert that the CPU computes (−1: none).
struct Partition {
  int64_t* addresses[num_matrices];
  int* cpu_ids;
};

// What a missing expert takes, in nanoseconds; see split.py.
struct MissTimes {
  int bus;  // 0: the bus reads none
  int answer;
  int ahead;                     // of the bus when the CPU begins
  int bus_left, cpu_left;        // in 1024ths
  int cpu[most_rows];            // of 1, 2, … rows of an expert
  int streamed[most_ranks + 1];  // how many of one token's n missing experts are read over the bus
  int fetched[most_ranks + 1];   // how many of a layer's n missing experts are copied ahead for one token
  int shared_fetched[most_ranks + 1];  // the same for several tokens; of more than most_ranks, as of so many
  int shared_on_cpu[most_ranks + 1];   // and how many, at least, the CPU will compute
};

// See csrc/hybrid/expert_server.h.
struct Mailbox {
  uint32_t* request;
  uint32_t* done;
  float* x;  // [capacity, cols]
  int* ids;  // [capacity, ranks]
};

// Places on the device for experts of one layer.
struct ExpertPlaces {
  int64_t data;  // of the first place
  int64_t place_bytes;
  int64_t offsets[num_matrices];  // in a place
  int count;

  __device__ __forceinline__ int64_t address(int place, int matrix) const {
    return data + place * place_bytes + offsets[matrix];
  }
};

// Prefetched experts of one layer; see prefetch.py.
struct Prefetched {
  uint32_t* keys;     // [room.count], of the expert in each place: 0 until it is complete
  ExpertPlaces room;  // of no places: nothing is prefetched
};

// The experts that the next launch copies over the bus; see stage.py.
struct Staging {
  int* list;          // their number, and the expert of each place [room.count]
  ExpertPlaces room;  // of no places: the bus reads none
};

// What sharing out a layer does for prefetching.
struct PrefetchNotes {
  uint32_t* emptied;  // keys [count] to clear, of places that are filled next for another layer; or null
  int count;
  uint32_t* reached;  // gets the layer's number + 1; null: nothing is prefetched
  int* tallies;       // [layers, num_tallies]: experts copied completely, those of them that were used, and
                      // those whose copy was given up
};

struct Sharing {
  Stack matrix[num_matrices];
  const MissTimes* times;
  Partition places;
  Mailbox box;
  int* used;            // [tokens, ranks]: all experts of the layer's tokens, for the cache of slots; or null
  LayerStamps* stamps;  // or null
  uint32_t request;     // for the CPU: the layer and the number of rows; 0: nothing is shared out
  Staging staging;      // for several tokens
  Prefetched prefetched;
  PrefetchNotes notes;
  const float* x;  // what experts read of the only token; null: what its router reads

  __device__ __forceinline__ uint32_t layer() const { return (request & 0xffff) - 1; }
};

constexpr uint32_t used_bit = 1u << 31;  // of a key

// Never 0.
__device__ __forceinline__ uint32_t prefetch_key(uint32_t layer, int id) { return (layer << 16 | id) + 1; }
__device__ __forceinline__ uint32_t layer_of_key(uint32_t key) { return ((key & ~used_bit) - 1) >> 16; }

// By one thread, which looks at the flag of the last request and goes on to work until it has to know. Who
// reads rows as they are written may be here before the CPU is done with that request: then nothing may be
// written for the next one.
struct LastAnswer {
  uint32_t done;

  __device__ __forceinline__ void look(const Mailbox& box) { done = load_relaxed_system(box.done); }
  __device__ __forceinline__ void wait(const Mailbox& box) const {
    if (!done) wait_for_answer({box.done, box.done + 1, 0});
  }
};

// Copies a row by one warp to memory of high latency.
__device__ __forceinline__ void send_row(const float* from, float* to, int cols) {
  constexpr int at_once = 8;  // loads in flight before the first store
  const int lane = threadIdx.x % warp_size;
  const uint64_t alignment = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to);
  if (alignment % 16 != 0 || cols % 4 != 0) {
#pragma unroll 1
    for (int i = lane; i < cols; i += warp_size) to[i] = from[i];
    return;
  }
#pragma unroll 1
  for (int first = lane; first < cols / 4; first += at_once * warp_size) {
    float4 values[at_once];
#pragma unroll
    for (int i = 0; i < at_once; i++) {
      const int place = first + i * warp_size;
      if (place < cols / 4) values[i] = reinterpret_cast<const float4*>(from)[place];
    }
#pragma unroll
    for (int i = 0; i < at_once; i++) {
      const int place = first + i * warp_size;
      if (place < cols / 4) reinterpret_cast<float4*>(to)[place] = values[i];
    }
  }
}

// For the CPU: experts of a later layer that it will probably compute. It reads them into its caches while
// nothing is asked of it; see csrc/hybrid/expert_server.h.
struct Hints {
  uint32_t* words;       // [ranks]; null: there are none
  const int64_t* slots;  // of the later layer's first matrix, by expert (0: none)
  const MissTimes* times;
  int64_t mapped;  // the device's address of that matrix in the mapped file, or 0
  uint32_t layer;
  int num_places;  // on the device, to which missing experts are copied meanwhile
};

// A table by number of missing experts, of which lane n holds entry n. It is read while the experts' places
// are, as the number is not known yet.
__device__ __forceinline__ int entry_of_lane(const int (&by_missing)[most_ranks + 1]) {
  const int lane = threadIdx.x % warp_size;
  return lane <= most_ranks ? by_missing[lane] : 0;
}

__device__ __forceinline__ int entry_for(int of_lane, uint32_t missing) {
  return __shfl_sync(all_lanes, of_lane, __popc(missing));
}

// Which of a single token's missing experts the CPU computes, by one warp: bit k for rank k. streamed: the
// lane's entry of that table. is_readable: whether the device can read the lane's expert over the bus.
__device__ __forceinline__ uint32_t share_of_cpu(int streamed, bool is_missing, bool is_readable) {
  const uint32_t missing = __ballot_sync(all_lanes, is_missing);
  const uint32_t readable = __ballot_sync(all_lanes, is_missing && is_readable);
  const int before = __popc(readable & ((1u << threadIdx.x % warp_size) - 1));
  const int num_on_bus = entry_for(streamed, missing);
  const bool is_on_bus = is_readable && before < num_on_bus;
  return __ballot_sync(all_lanes, is_missing && !is_on_bus);
}

// By one warp, whose lane k has the id of rank k as a guess. Each word says by itself which layer it is for:
// they may arrive in any order.
__device__ __forceinline__ void write_hints(const Hints& hints, int id, int num_ranks) {
  const int lane = threadIdx.x % warp_size;
  const int fetched = entry_of_lane(hints.times->fetched), streamed = entry_of_lane(hints.times->streamed);
  const bool is_missing = lane < num_ranks && hints.slots[id] == 0;
  const uint32_t missing = __ballot_sync(all_lanes, is_missing);
  const int num_fetched = min(entry_for(fetched, missing), hints.num_places);
  const bool is_fetched = __popc(missing & ((1u << lane) - 1)) < num_fetched;
  const bool is_on_cpu = share_of_cpu(streamed, is_missing && !is_fetched, hints.mapped != 0) >> lane & 1;
  if (lane >= num_ranks) return;
  const uint32_t word = (hints.layer + 1) << 16 | (is_on_cpu ? id + 1 : 0);
  *reinterpret_cast<volatile uint32_t*>(hints.words + lane) = word;
}

// Prefetches the tables of slots into the cache, with a thread for every line: since they were last read, the
// weights of a whole token have passed through it. They change only between two steps.
__device__ __forceinline__ void bring_slots_near(const Sharing& sharing, const Hints& hints,
                                                 int num_experts) {
  constexpr int per_line = 128 / sizeof(int64_t);
  const int first = threadIdx.x * per_line;
  if (sharing.request == 0 || first >= num_experts) return;
#pragma unroll
  for (int i = 0; i < num_matrices; i++) {
    bring_near(sharing.matrix[i].slots + first);
    if (sharing.matrix[i].pooled != nullptr) bring_near(sharing.matrix[i].pooled + first);
  }
  if (hints.words != nullptr) bring_near(hints.slots + first);
}

// Whether the key of a place is that of an expert, which is used then; `slots` are its addresses.
__device__ __forceinline__ bool use_prefetched(const Sharing& sharing, int place, uint32_t key, int id,
                                               int64_t (&slots)[num_matrices]) {
  const Prefetched& fetched = sharing.prefetched;
  if ((key & ~used_bit) != prefetch_key(sharing.layer(), id)) return false;
  if (!(key & used_bit)) atomicOr(fetched.keys + place, used_bit);
#pragma unroll
  for (int i = 0; i < num_matrices; i++) slots[i] = fetched.room.address(place, i);
  return true;
}

// Whether an expert has been prefetched; `slots` are its addresses then.
__device__ __forceinline__ bool find_prefetched(const Sharing& sharing, int id,
                                                int64_t (&slots)[num_matrices]) {
  const Prefetched& fetched = sharing.prefetched;
#pragma unroll 1
  for (int place = 0; place < fetched.room.count; place++) {
    if (use_prefetched(sharing, place, load_acquire(fetched.keys + place), id, slots)) return true;
  }
  return false;
}

// By a block, after all pairs have been shared out: counts the experts in places that are filled next,
// and clears their keys. The places are filled after this kernel has ended.
__device__ __forceinline__ void make_room(const Sharing& sharing) {
  const PrefetchNotes& notes = sharing.notes;
  if (notes.reached == nullptr) return;
  if (notes.emptied != nullptr && int(threadIdx.x) < notes.count && notes.emptied[threadIdx.x] != 0) {
    const uint32_t key = notes.emptied[threadIdx.x];
    int* tally = notes.tallies + num_tallies * layer_of_key(key);
    atomicAdd(tally, 1);
    if (key & used_bit) atomicAdd(tally + 1, 1);
    notes.emptied[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) *reinterpret_cast<volatile uint32_t*>(notes.reached) = sharing.layer() + 1;
}

// The addresses of an expert's slot or of the place where it has been prefetched. False if there is neither.
__device__ __forceinline__ bool find_on_device(const Sharing& sharing, int id,
                                               int64_t (&addresses)[num_matrices]) {
#pragma unroll
  for (int i = 0; i < num_matrices; i++) addresses[i] = sharing.matrix[i].slots[id];
  const bool has_slot = addresses[0] != 0 && addresses[1] != 0 && addresses[2] != 0;
  return has_slot || find_prefetched(sharing, id, addresses);
}

// The same by one warp, of the expert of each lane that exists. All keys are read at once, beside the slots:
// a read takes most of a microsecond, and the layer waits for it.
static_assert(most_ranks <= warp_size);
__device__ __forceinline__ bool find_all_on_device(const Sharing& sharing, bool exists, int id,
                                                   int64_t (&addresses)[num_matrices]) {
  const int lane = threadIdx.x % warp_size, num_places = sharing.prefetched.room.count;
#pragma unroll
  for (int i = 0; i < num_matrices; i++) addresses[i] = exists ? sharing.matrix[i].slots[id] : 0;
  const uint32_t keys = lane < num_places ? load_acquire(sharing.prefetched.keys + lane) : 0;
  bool is_found = addresses[0] != 0 && addresses[1] != 0 && addresses[2] != 0;
#pragma unroll 1
  for (int place = 0; place < num_places; place++) {
    const uint32_t key = __shfl_sync(all_lanes, keys, place);
    if (exists && !is_found) is_found = use_prefetched(sharing, place, key, id, addresses);
  }
  return is_found;
}

// Of a missing expert: in the host's memory, which is read over the bus. False if it cannot be read.
__device__ __forceinline__ bool find_on_host(const Sharing& sharing, int id,
                                             int64_t (&addresses)[num_matrices]) {
#pragma unroll
  for (int i = 0; i < num_matrices; i++) addresses[i] = sharing.matrix[i].over_bus(id);
  return addresses[0] != 0;
}

__device__ __forceinline__ void place_expert(const Sharing& sharing, int id,
                                             const int64_t (&addresses)[num_matrices]) {
#pragma unroll
  for (int i = 0; i < num_matrices; i++) sharing.places.addresses[i][id] = addresses[i];
}

// Writes for the lane's pair what the CPU has to know.
__device__ __forceinline__ void place_pair(const Sharing& sharing, int pair, int id, bool is_on_cpu) {
  sharing.places.cpu_ids[pair] = sharing.box.ids[pair] = is_on_cpu ? id : -1;
  if (sharing.used) sharing.used[pair] = id;
}

// Shares out the pairs of the only token by one warp, whose lane k has the id of rank k. Whether the CPU
// computes any of them, in all lanes: then it has to be asked, with the token's x in its mailbox.
__device__ __forceinline__ bool share_out(const Sharing& sharing, int id, int num_ranks) {
  const int lane = threadIdx.x % warp_size;
  const bool exists = lane < num_ranks;
  int64_t addresses[num_matrices];
  const int streamed = entry_of_lane(sharing.times->streamed);
  const bool is_missing = !find_all_on_device(sharing, exists, id, addresses) && exists;
  const bool is_readable = is_missing && find_on_host(sharing, id, addresses);
  const uint32_t missing = __ballot_sync(all_lanes, is_missing);
  const uint32_t on_cpu = share_of_cpu(streamed, is_missing, is_readable);
  const bool is_on_cpu = on_cpu >> lane & 1;
  if (is_on_cpu) {
#pragma unroll
    for (int i = 0; i < num_matrices; i++) addresses[i] = 0;
  }
  if (exists) {
    place_expert(sharing, id, addresses);
    place_pair(sharing, lane, id, is_on_cpu);
  }
  if (sharing.stamps && lane == 0 && missing != on_cpu) {
    add_up(&sharing.stamps->router.pairs, __popc(missing & ~on_cpu));
  }
  return on_cpu != 0;
}

// By one thread, with a barrier of the block behind whatever its threads have written for the request.
__device__ __forceinline__ void ask(const Mailbox& box, uint32_t request) {
  store_relaxed_system(box.done, 0);
  store_release_system(box.request, request);
}

// By one thread, after all pairs have been shared out, with a barrier as above.
__device__ __forceinline__ void ask_the_cpu(const Sharing& sharing) { ask(sharing.box, sharing.request); }

}  // namespace coldstream
