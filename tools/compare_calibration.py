"""How much of round-to-nearest's error calibration takes away: NVFP4 by both, made from the same weights.

    python tools/compare_calibration.py [MODEL] [--calibration FILE --heldout FILE]

MODEL: an unquantized directory, or "tiny" (default). FILE: texts as `python -m qerl_jax.quantize --calibration` reads
them. Without them, texts are MODEL's own completions (temperature 1) of a generated dataset: of its train split for
calibration, of its test split as held-out texts.

MODEL is quantized twice into a temporary directory, and all three models read the held-out texts in fp32 arithmetic on
the device at hand. KL(unquantized ‖ quantized) of the next token is averaged over all tokens; its reduction has a
bootstrap interval over texts, paired. The row goes to `calibration.json` of tools/results/cpu, or of `--out`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from compare_formats import logit_errors, logits_of
from record import ROOT, add_commit, write_rows

from qerl_jax import LoraConfig, Policy, Sampling, generate, keys, load_policy
from qerl_jax.data.problems import load_dataset
from qerl_jax.data.prompts import encode
from qerl_jax.data.texts import load_texts
from qerl_jax.evaluation.statistics import reduction
from qerl_jax.io.assets import model_path
from qerl_jax.io.quantize import quantize_checkpoint
from qerl_jax.run.calibrate import SEQUENCES, TOKENS, calibrate_checkpoint

TRAIN_TEXTS, TEST_TEXTS = 128, 512
NEW_TOKENS = {"arithmetic": 64}
"""Longest completion of each generated dataset."""
OTHER_NEW_TOKENS = 512
BATCH, PAD = 16, 64  # texts read together; their length is a multiple of this, so that few programs are compiled


def load(path: Path) -> Policy:
    """A model in fp32 arithmetic."""
    return load_policy(path, None, LoraConfig(rank=0), jnp.float32, matmul_kernel="xla")


def write_completions(policy: Policy, dataset: str, split: str, count: int, path: Path) -> Path:
    """Prompts with the policy's completions, as texts."""
    prompts = encode(load_dataset(dataset, split, limit=count).problems, policy.tokenizer, "")
    longest = NEW_TOKENS.get(dataset.partition(":")[0], OTHER_NEW_TOKENS)
    sampling, key = Sampling(longest, temperature=1.0), keys.for_step(0, keys.Purpose.SAMPLE, 0)
    rollout = generate(policy, prompts, sampling, key)
    tokens, real = np.asarray(rollout.tokens), np.asarray(rollout.attention_mask)
    texts = [policy.tokenizer.decode(row[mask]) for row, mask in zip(tokens, real, strict=True)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def text_errors(exact: Policy, policies: dict[str, Policy], texts: list[np.ndarray]) -> tuple[list[int], dict]:
    """Predicted tokens of each text, and by policy the sums over them of `logit_errors`."""
    ordered, counts = sorted(texts, key=len), []
    found: dict[str, dict[str, list[float]]] = {name: {} for name in policies}
    for start in range(0, len(ordered), BATCH):
        rows = ordered[start : start + BATCH]
        lengths = np.array([len(row) for row in rows])
        width = -(-lengths.max() // PAD) * PAD
        tokens, mask = (
            np.stack([np.pad(row, (0, width - len(row))) for row in rows]),
            np.arange(width) < lengths[:, None],
        )
        expected = np.asarray(logits_of(exact, tokens, mask))
        counts += [int(length) - 1 for length in lengths]
        for name, policy in policies.items():
            logits = np.asarray(logits_of(policy, tokens, mask))
            for row, length in enumerate(lengths - 1):  # nothing follows the last token
                for error, values in logit_errors(expected[row, :length], logits[row, :length]).items():
                    found[name].setdefault(error, []).append(float(values.sum()))
    return counts, found


def compare(
    model: Path,
    calibration: Path | None,
    heldout: Path | None,
    sequences: int,
    tokens: int,
    longest: int,
    dataset: str = "arithmetic",
) -> dict:
    """The row of a model."""
    exact = load(model)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        names = [path.name if path else f"own completions, {dataset}" for path in (calibration, heldout)]
        calibration = calibration or write_completions(exact, dataset, "train", TRAIN_TEXTS, place / "train.jsonl")
        heldout = heldout or write_completions(exact, dataset, "test", TEST_TEXTS, place / "test.jsonl")
        quantize_checkpoint(model, place / "rounded")
        started = time.perf_counter()
        calibrate_checkpoint(model, place / "calibrated", calibration, sequences, tokens)
        seconds = time.perf_counter() - started
        texts = load_texts(heldout, exact.tokenizer, 1_000_000, longest)
        policies = {name: load(place / name) for name in ("rounded", "calibrated")}
        counts, errors = text_errors(exact, policies, texts)
    total, gain = sum(counts), reduction(errors["rounded"]["kl"], errors["calibrated"]["kl"])
    row = {
        "model": model.name,
        "parameters": exact.config.parameter_count(),
        "calibration_file": names[0],
        "heldout_file": names[1],
        "calibration_sequences": sequences,
        "calibration_tokens": tokens,
        "compared_texts": len(counts),
        "compared_tokens": total,
        "seconds": seconds,
    }
    for name, sums in errors.items():
        row |= {f"{error}_{name}": sum(values) / total for error, values in sums.items()}
    return {**row, "kl_reduction": gain.value, "kl_reduction_low": gain.low, "kl_reduction_high": gain.high}


def sentences(row: dict) -> str:
    """The row for people."""
    agreement = [f"{100 * row[f'top1_agreement_{kind}']:.2f}" for kind in ("rounded", "calibrated")]
    interval = f"{100 * row['kl_reduction_low']:.1f} to {100 * row['kl_reduction_high']:.1f} %"
    return (
        f"{row['model']} ({row['parameters']:,} parameters), {row['compared_texts']} held-out texts, "
        f"{row['compared_tokens']:,} tokens\n"
        f"KL, nats a token: {row['kl_rounded']:.4g} by round-to-nearest, {row['kl_calibrated']:.4g} calibrated: "
        f"{100 * row['kl_reduction']:.1f} % less (95 % interval {interval})\n"
        f"same top token: {' and '.join(agreement)} %; "
        f"calibration took {row['seconds']:.0f} s"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny", help='model directory, or "tiny"')
    parser.add_argument("--calibration", type=Path, help="file of texts")
    parser.add_argument("--heldout", type=Path, help="file of texts that calibration does not see")
    parser.add_argument("--dataset", choices=NEW_TOKENS, default="arithmetic", help="whose problems are completed")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="most calibration texts")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens after which a calibration text is cut")
    parser.add_argument("--longest", type=int, default=512, help="tokens after which a held-out text is cut")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "tools" / "results" / "cpu", help="where calibration.json is"
    )
    add_commit(parser)
    args = parser.parse_args()
    sizes = args.sequences, args.tokens, args.longest
    row = compare(model_path(args.model), args.calibration, args.heldout, *sizes, args.dataset)
    print(sentences(row))
    write_rows(args.out / "calibration.json", [row], args.commit)


if __name__ == "__main__":
    main()
