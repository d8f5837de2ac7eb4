"""The GEMM of data center Blackwell."""
