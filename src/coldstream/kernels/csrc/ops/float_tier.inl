// The float kernels of a tier, over its Vec16 and its integer lanes.

#include "ops/float_kernels.inl"
#include "ops/attention_kernels.inl"
#include "ops/indexer_kernels.inl"
#include "ops/integer_attention_kernels.inl"
#include "ops/delta_net_kernels.inl"
#include "ops/router_kernels.inl"
