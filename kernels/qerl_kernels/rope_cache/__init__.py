"""Rotary embedding of q and k, and the write of k and v into the caches, in one launch: entry point in `rope`, plain
JAX in `reference`.
"""
