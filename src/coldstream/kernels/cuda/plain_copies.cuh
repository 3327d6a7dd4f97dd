// Copies from global to shared memory where no instruction makes them: a thread loads and stores, and its
// copy is complete when it goes on. Groups and waits remain where kernels have them, and cost nothing.
#pragma once

namespace coldstream {

// Past the first-level cache, as copies go.
template <class T>
__device__ __forceinline__ void copy_plainly(void* shared, const void* global) {
  *static_cast<T*>(shared) = __ldcg(static_cast<const T*>(global));
}

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  copy_plainly<uint4>(shared, global);
}

__device__ __forceinline__ void copy_async_8(void* shared, const void* global) {
  copy_plainly<uint2>(shared, global);
}

__device__ __forceinline__ void copy_if_below(int limit, int index, uint32_t to, const void* from) {
  if (index < limit) copy_plainly<uint4>(shared_at(to), from);
}

__device__ __forceinline__ void copy_word_if_below(int limit, int index, uint32_t to, const void* from) {
  if (index < limit) copy_plainly<unsigned int>(shared_at(to), from);
}

__device__ __forceinline__ void commit_copies() {}

template <int pending>
__device__ __forceinline__ void wait_for_copies() {
  end_of_copies();
}

}  // namespace coldstream
