"""GEMM with a 4-bit floating point weight: entry in `api`, plain JAX in `reference`."""
