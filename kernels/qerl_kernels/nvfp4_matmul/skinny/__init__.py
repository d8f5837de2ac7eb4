"""NVFP4 GEMM for decode batches: `kernel` says how it works."""
