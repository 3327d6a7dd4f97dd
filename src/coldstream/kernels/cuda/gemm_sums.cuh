// The float sums of a tile: from groups of 256 inputs to leaves of the summation tree, from leaves to the
// root, and from the root to the output.
#pragma once

#include "cuda/gemm_copies.cuh"

namespace coldstream::gemm {

template <class T>
struct Accumulators {
  float p[T::num_sums][T::mt][T::nt][4];
  float left[T::mt][T::nt][4];  // left siblings of the lowest level, where that level is not in shared memory
  float4* waiting;              // this thread's left siblings in shared memory

  __device__ void clear() {
#pragma unroll
    for (int k = 0; k < T::num_sums; k++)
      each([&](int m, int n) {
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][m][n][i] = 0.0f;
      });
  }

  // Of eight accumulators, whose sum p[0] becomes.
  __device__ void close_eight() {
    each([&](int m, int n) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float lanes[8];
#pragma unroll
        for (int k = 0; k < 8; k++) lanes[k] = p[k][m][n][i];
        p[0][m][n][i] = sum_of_eight(lanes);
      }
    });
  }

  // Adds the complete leaf `leaf` to the tree; `next` is the leaf that follows. If that is 8, there is none,
  // and p[0] becomes the root. Of the tiles of eight activation rows only the first nt count.
  template <int nt = T::nt>
  __device__ void close(int leaf, int next) {
    if constexpr (T::num_sums == 2) {
      each<nt>([&](int m, int n) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          p[0][m][n][i] += p[1][m][n][i];
          p[1][m][n][i] = 0.0f;
        }
      });
      if (close_level<1, nt>(leaf, next)) close_level<2, nt>(leaf, next);
      return;
    }
    if (close_level<0, nt>(leaf, next) && close_level<1, nt>(leaf, next)) close_level<2, nt>(leaf, next);
  }

 private:
  // True if the parent's subtree is complete too.
  template <int level, int nt>
  __device__ bool close_level(int leaf, int next) {
    if (leaf >> level & 1) {
      each<nt>([&](int m, int n) {
        float sibling[4];
        load<level>(m, n, sibling);
#pragma unroll
        for (int i = 0; i < 4; i++) p[0][m][n][i] = sibling[i] + p[0][m][n][i];
      });
    } else if (leaf >> (level + 1) == next >> (level + 1)) {
      each<nt>([&](int m, int n) {
        store<level>(m, n, p[0][m][n]);
#pragma unroll
        for (int i = 0; i < 4; i++) p[0][m][n][i] = 0.0f;
      });
      return false;
    }
    return true;
  }

  template <int level>
  static constexpr int depth = level - (3 - T::shared_levels);

  template <int level>
  __device__ float4& place_of(int m, int n) {
    return waiting[((depth<level> * T::mt + m) * T::nt + n) * T::multiplying_threads];
  }

  template <int level>
  __device__ void load(int m, int n, float (&sibling)[4]) {
    if constexpr (depth<level> < 0) {
#pragma unroll
      for (int i = 0; i < 4; i++) sibling[i] = left[m][n][i];
    } else {
      const float4 stored = place_of<level>(m, n);
      sibling[0] = stored.x, sibling[1] = stored.y, sibling[2] = stored.z, sibling[3] = stored.w;
    }
  }

  template <int level>
  __device__ void store(int m, int n, const float (&subtree)[4]) {
    if constexpr (depth<level> < 0) {
#pragma unroll
      for (int i = 0; i < 4; i++) left[m][n][i] = subtree[i];
    } else {
      place_of<level>(m, n) = make_float4(subtree[0], subtree[1], subtree[2], subtree[3]);
    }
  }

  template <int nt = T::nt, class F>
  __device__ static void each(F f) {
#pragma unroll
    for (int m = 0; m < T::mt; m++)
#pragma unroll
      for (int n = 0; n < nt; n++) f(m, n);
  }
};

template <class T, class Job>
__device__ __forceinline__ void store_tile(const Job& job, const Header& head, const Fragment& at,
                                           const Accumulators<T>& sums) {
  int rows[T::nt][2];  // all are loaded before the first is used, so that the loads overlap
#pragma unroll
  for (int n = 0; n < T::nt; n++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      rows[n][i] =
          job.out_row(head.first + min((n * T::columns + at.column) * 8 + 2 * at.t + i, head.count - 1));
#pragma unroll
  for (int n = 0; n < T::nt; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if ((n * T::columns + at.column) * 8 + 2 * at.t + i >= head.count) continue;
#pragma unroll
      for (int m = 0; m < T::mt; m++)
        job.store(rows[n][i], head.row, at.row + 16 * m + at.g, sums.p[0][m][n][i], sums.p[0][m][n][2 + i]);
    }
}

template <class T, class Job>
__device__ __forceinline__ void end_tile(const Job& job, const Header& head, const Fragment& at,
                                         Accumulators<T>& sums) {
  store_tile<T>(job, head, at, sums);
  sums.clear();
}

// Ends a group of inputs. The last group of a leaf also ends the leaf, and the last leaf ends the tile.
template <class T, class Job>
__device__ __forceinline__ void end_group(const Job& job, const Header& head, const Fragment& at,
                                          Accumulators<T>& sums) {
  const int leaf = head.progress & 255, next = head.progress >> 8 & 255;
  if (leaf != next) sums.close(leaf, next);
  if (next == 8) end_tile<T>(job, head, at, sums);
}

}  // namespace coldstream::gemm
