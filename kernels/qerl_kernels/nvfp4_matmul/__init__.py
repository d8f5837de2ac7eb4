"""Matrix product with a 4-bit floating point weight: types in `api`, plain JAX in `reference`."""
