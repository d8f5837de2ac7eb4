"""Attention of one query token a row over a shared prompt and the row's own cache: entry in `attention`, plain JAX in
`reference`."""
