"""Loads whose layout in registers is stated."""

from __future__ import annotations

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu


def load(ref: jax.Ref, layout: plgpu.Layout, transforms: tuple = ()) -> jax.Array:
    """`plgpu.load(ref, layout=layout, optimized=False)`, in the same instructions.

    Mosaic searches for the layout of its own load and only then casts it to the one that is asked for. That search, in
    Python before every compilation, tries out one load after another and looks at the whole kernel for each.

    Args:
      ref: in global or in shared memory.
      layout: a tiled one, or `WG_STRIDED`, which takes no transforms.
      transforms: tiling and swizzle of `ref` in shared memory.
    """
    dtype = ref.dtype

    def emit(ctx, ref):
        del ctx
        found, is_signed = layout.to_mgpu(), mgpu.utils.is_signed(dtype)
        if isinstance(found, mgpu.WGStridedFragLayout):
            assert not transforms, transforms
            return mgpu.FragmentedArray.load_strided(ref, is_signed=is_signed, vec_size=found.vec_size)
        how = {"layout": found, "is_signed": is_signed, "optimized": False}
        if not transforms:
            return mgpu.FragmentedArray.load_untiled(ref, **how)
        tiling, swizzle = transforms
        return mgpu.FragmentedArray.load_tiled(ref, swizzle.swizzle, tiling_rank=len(tiling.tiling), **how)

    result = plgpu.ShapeDtypeStruct(ref.shape, dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms),), return_type=result)(emit)(ref)
