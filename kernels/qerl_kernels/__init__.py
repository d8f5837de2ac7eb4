"""GPU kernels of QeRL-JAX, each beside its readable reference. Imports nothing of `qerl_jax`."""
