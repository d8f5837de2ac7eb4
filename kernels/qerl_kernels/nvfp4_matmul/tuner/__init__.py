"""Search for the configs of a GPU's tuning table: candidates, their times on the GPU, successive halving."""
