// Ends when the CPU has answered: one thread that looks, where every block of the kernel behind it would.
#include "cuda/answer.cuh"

using namespace coldstream;

extern "C" __global__ void __launch_bounds__(32) wait_answer(const __grid_constant__ Answer answer) {
  if (threadIdx.x == 0) wait_for_answer(answer);
}
