"""Rotary embedding of one token's q and k, and the write of its k and v into the caches, in one launch."""
