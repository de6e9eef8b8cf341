"""One accelerator's memory: opening it, copying it, verifying it. The only package that may import CUDA."""
