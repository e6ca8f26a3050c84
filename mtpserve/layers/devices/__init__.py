"""The kernels of a device as a `Kernels` record: Triton for GPUs, C++ for CPUs."""
