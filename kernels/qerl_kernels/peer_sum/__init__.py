"""Sum of a few rows over the GPUs of a process, each of which writes into the memory of the others."""
