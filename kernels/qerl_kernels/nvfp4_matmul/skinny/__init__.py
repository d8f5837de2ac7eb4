"""NVFP4 GEMM for decode batches (M ≤ 32) on Hopper: `kernel` says how it works."""
