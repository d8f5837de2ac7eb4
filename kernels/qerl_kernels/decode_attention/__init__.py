"""Split-KV flash decoding: attention of one query token a sequence over a shared prompt cache and its own cache."""
