"""Independent implementations in numpy and PyTorch, written from formulas and libraries, never from `qerl_jax`."""
