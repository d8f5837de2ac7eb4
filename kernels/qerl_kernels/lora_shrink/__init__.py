"""What precedes a projection in decode, and its adapters' `x A`, in one launch: entry points in `shrink`, plain JAX in
`reference`.
"""
