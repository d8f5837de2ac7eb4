"""NF4 by bitsandbytes 0.50.2 and transformers 5.23.0 on a CPU. The program that made it is this file up to e6a12502.

- `golden.json`: SHA-256 of the tensors that transformers saves of the bundled policy, loaded with `load_in_4bit` and
  type nf4, and its `quantization_config`.
- `stress.safetensors`: `weights()` quantized by the library, with and without double quantization, and the absmax that
  it dequantizes.
- `double-quantized/`: a random fp32 model as transformers saves it with double quantization, and its logits there.
"""

from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/data/nf4"
NF4 = (  # bitsandbytes/functional.py, get_4bit_type
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def weights() -> dict[str, np.ndarray]:
    """By name of the dtype: [18, 960], that is 270 blocks. Normal rows over many magnitudes; rows of values on the
    boundaries between codes, and one ulp beside them, for absmax 1 and for others; blocks of zeros, of -0, and of
    values below 1e-38.
    """
    rng = np.random.default_rng(7)
    weight = (rng.normal(size=(18, 960)) * 10.0 ** rng.uniform(-4, 2, size=(18, 1))).astype(np.float32)
    table = np.asarray(NF4, np.float32)
    boundaries = np.resize((table[1:] + table[:-1]) / 2, 960)
    for row, amax in enumerate((1.0, 0.7, 3.1e-3, 1.9)):
        near = rng.choice(np.asarray([-np.inf, np.inf], np.float32), 960)
        exact = boundaries * np.float32(amax)
        weight[row] = np.where(rng.random(960) < 0.4, exact, np.nextafter(exact, near))
        weight[row, ::64] = amax * (-1) ** row
    weight[4, :64], weight[4, 64:128] = 0, np.where(np.arange(64) % 2, -0.0, 0.0)
    weight[4, 128:192] = rng.normal(size=64) * 1e-39
    return {name: weight.astype(getattr(ml_dtypes, name, name)) for name in ("bfloat16", "float16", "float32")}
