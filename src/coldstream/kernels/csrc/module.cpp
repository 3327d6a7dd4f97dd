#include "bindings.h"

NB_MODULE(_csrc, m) {
  m.doc() = "CPU kernels of coldstream.";
  coldstream::bind_runtime(m);
  coldstream::bind_expert_pool(m);
  coldstream::bind_quant(m);
  coldstream::bind_ops(m);
  coldstream::bind_sampler(m);
  coldstream::bind_hybrid(m);
}
