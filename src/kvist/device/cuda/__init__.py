"""CUDA memory: exported by engines, opened by the daemon, and copied with kernels of our own."""
