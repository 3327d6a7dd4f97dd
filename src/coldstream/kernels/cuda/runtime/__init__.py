"""The GPU as the package uses it: a thread's context and stream, events, graphs and memory.

Device, streams, events, graphs, the pool and page-locked memory are those of `cuda.core`. `cuda.bindings` is
called for what that lacks (blocks to the byte, copies between addresses, free memory, giving a pool's memory
back), and for launches of kernels, of which a step has hundreds. No other room knows either of them, but for
the compiler and for the registration of mapped memory.
"""
