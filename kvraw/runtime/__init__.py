"""The CUDA driver from Python: contexts, streams, events, kernels and host memory. Nothing here knows KV caches."""
