"""Independent implementations in numpy and PyTorch, written from the formulas and the libraries, never from
`qerl_jax`.
"""
