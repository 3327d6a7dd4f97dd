// The kernels of the package's file SOURCE for the host, to be launched by their place in the list KERNELS;
// the build names both. See grid.cpp.
#include "device.h"

alignas(1024) thread_local float4 dynamic_shared[SHARED_KIB * 64];

#include SOURCE

void touch_shared_memory() { *const_cast<volatile float*>(&dynamic_shared[0].x) = 0.0f; }

// Takes the arguments from where a driver finds them: one address for each.
template <class... Left>
struct Parameters;

template <>
struct Parameters<> {
  template <class Kernel, class... Given>
  static void call(Kernel kernel, void**, const Given&... given) {
    kernel(given...);
  }
};

template <class First, class... Left>
struct Parameters<First, Left...> {
  template <class Kernel, class... Given>
  static void call(Kernel kernel, void** arguments, const Given&... given) {
    Parameters<Left...>::call(kernel, arguments + 1, given..., *static_cast<const First*>(arguments[0]));
  }
};

template <class... P>
void call_kernel(void (*kernel)(P...), void** arguments) {
  Parameters<P...>::call(kernel, arguments);
}

template <auto kernel>
void run_thread_of(void** arguments) {
  call_kernel(kernel, arguments);
}

static void (*const kernels[])(void**) = {KERNELS};

// Null, or what the threads did wrong. `seed` decides in which order they run.
extern "C" __attribute__((visibility("default"))) const char* launch(
    int kernel, void** arguments, const unsigned int* grid, unsigned int threads, unsigned int shared_bytes,
    unsigned long long seed, bool keeps_time, bool together) {
  return run_grid(kernels[kernel], arguments, grid, threads, reinterpret_cast<unsigned char*>(dynamic_shared),
                  shared_bytes, sizeof dynamic_shared, seed, keeps_time, together);
}
