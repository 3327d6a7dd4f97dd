"""CUDA C++ at run time: compiling, launching, and the device code that kernels share."""
