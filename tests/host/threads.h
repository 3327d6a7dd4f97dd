// The threads of a kernel on the host, as kernels see them and as grid.cpp runs them.
#pragma once

struct dim3 {
  unsigned int x, y, z;
};

// Of the thread that runs.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

// How the threads of a warp or a block meet: each gives a value, and goes on with what all values make of it.
enum class Meeting {
  sync,
  shuffle_xor,
  shuffle_up,
  shuffle_from,
  ballot,
  add,
  least,
  greatest_signed,
  compute
};
unsigned long long meet_in_warp(Meeting how, unsigned int lanes, unsigned long long value,
                                unsigned int argument);
int meet_in_block(bool counts, int value);

// All 32 lanes of a warp meet, each with operands of its own, and what they are to get is computed for all of
// them at once, as by one instruction of the warp; false if lanes gave what none of them may give alone.
using WarpComputation = bool (*)(void* const* lanes);
void compute_in_warp(WarpComputation compute, void* own);

// As many threads of the block as `count` says; and until another thread of the block has changed something.
void meet_some(int barrier, int count);
void wait_for_change();
void note_change();
bool wait_for_other_blocks();  // once, for a thread that looks again then; false: all wait, and for long
unsigned int given_shared_bytes();

// Lets others run, and the clock go on: the host's, or one that is fast, so that no test waits for it.
void __nanosleep(unsigned int ns);
unsigned long long look_at_clock();

// Copies of 16 bytes, which are done when the thread has waited for them; see grid.cpp.
void begin_copy(void* to, const void* from, unsigned int bytes);
void end_group_of_copies();
void wait_for_groups(int pending);  // all but the last `pending`

// Products of a warpgroup, which are computed when the thread waits for them: `take_product` gives the oldest
// that is not of the last `pending` groups, or null.
void keep_product(void* product);
void begin_product_group();
void* take_product(int pending);

// A launch: null, or what the threads did that they must not. `arguments` are addresses of the kernel's
// arguments, `dynamic` is the block's shared memory of `available` bytes, of which the launch has given it
// some. `keeps_time`: the device's clock is the host's, as it has to be where other threads of the host are
// waited for. `together`: blocks wait for each other, so that all of them are under way at once.
const char* run_grid(void (*kernel)(void**), void** arguments, const unsigned int* grid, unsigned int threads,
                     unsigned char* dynamic, unsigned long given, unsigned long available,
                     unsigned long long seed, bool keeps_time, bool together);
