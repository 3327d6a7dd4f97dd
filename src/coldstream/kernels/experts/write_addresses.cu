// Entries of tables of addresses that change between two steps; see addresses.py.
#include "cuda/common.cuh"

using namespace coldstream;

struct Entry {
  int64_t* where;
  int64_t value;
};

extern "C" __global__ void __launch_bounds__(256) write_addresses(const Entry* entries, int count) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) *entries[i].where = entries[i].value;
}
