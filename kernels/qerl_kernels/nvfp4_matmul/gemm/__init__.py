"""The warp-specialized NVFP4 GEMM for Hopper, for any number of rows of x."""
