"""Pretrain the bundled tiny policy: corpus, tokenizer and a Qwen2 model in one command.

    python tools/pretrain_tiny.py --out qerl_jax/assets/tiny-qwen2            # a CUDA device if there is one

The corpus holds worked solutions to the training split of `qerl_jax.data.arithmetic` by simulated authors of different
care. Few write every step; most stop before the end of a longer problem, mistake an operation, slip in a sum or forget
the answer tags (`AUTHORS`). A model of this corpus resembles a base model: it can solve nearly every problem and
usually does not. The corpus never contains held-out numbers or templates.

Writes a complete Hugging Face directory, and `pretraining.json` with settings, versions and the accuracy after
quantization to NVFP4. That takes 90 seconds on an H200 and about 8 hours on two CPU cores, where `--size smoke --steps
60 --batch-size 64 --problems 20000` checks the recipe in a minute. Results of two seeds:
`tools/results/nvidia-h200/pretrain_tiny.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import multiprocessing
import os
import platform
import random
import re
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers
import torch
import transformers
from pretraining.tokenizer import END_OF_TEXT, IM_END, SPECIAL, make_tokenizer, prompt_text
from qerl_kernels.nvfp4_matmul import reference

from qerl_jax.data.arithmetic import Step, WordProblem, arithmetic_problem
from qerl_jax.models.formats import nvfp4

VOCABULARY = 512
LENGTH = 144
"""Tokens of a training document, padding included."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of the model; hidden and ffn sizes divide by 64, so that NVFP4, MXFP4 and NF4 blocks fit."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 32


SIZES = {
    "smoke": Size(64, 128, 1, 2, 1),
    "small": Size(128, 384, 4, 4, 2),
    "medium": Size(128, 384, 6, 4, 2),
    "large": Size(192, 512, 5, 6, 2),
}

# Share of authors who work through every step, by the number of steps.
CAREFUL = {2: 0.45, 3: 0.28, 4: 0.20}
# Shares of the other authors' habits.
STOP_EARLY, IN_THE_HEAD, WRONG_OPERATION, SLIP = "stops early", "in the head", "wrong operation", "slip"
AUTHORS = {STOP_EARLY: 0.62, IN_THE_HEAD: 0.16, WRONG_OPERATION: 0.12, SLIP: 0.10}
FORGETS_TAGS = 0.03


def write_solution(problem: WordProblem, rng: random.Random) -> str:
    """A completion as one of the authors writes it."""
    steps, answer = list(problem.steps), problem.answer
    if rng.random() >= CAREFUL[len(steps)]:
        author = rng.choices(list(AUTHORS), list(AUTHORS.values()))[0]
        if author == STOP_EARLY:  # forgets the last sentence
            steps = steps[:-1]
            answer = str(steps[-1].result)
        elif author == IN_THE_HEAD:  # the last step is guessed
            steps = steps[:-1]
            answer = str(_slip(int(answer), rng)) if rng.random() < 0.7 else answer
        else:
            steps = _with_error(steps, author, rng)
            answer = steps[-1][1]
            steps = [text for text, _ in steps]
    text = "<think>" + "\n".join(str(step) for step in steps) + "</think>"
    return text + (answer if rng.random() < FORGETS_TAGS else f"<answer>{answer}</answer>")


def _with_error(steps: list[Step], author: str, rng: random.Random) -> list[tuple[str, str]]:
    """Text and result of each step, one of them wrong; later steps continue from the wrong value."""
    wrong = rng.randrange(len(steps))
    replaced: dict[int, int] = {}
    written = []
    for i, step in enumerate(steps):
        left, right, op = replaced.get(step.left, step.left), replaced.get(step.right, step.right), step.op
        if i == wrong and author == WRONG_OPERATION:
            op = {"+": "-", "-": "+", "*": "+", "/": "-"}[op]
        if op == "-" and right >= left:
            left, right = right, left
        result = Step(left, op, max(right, 1)).result
        if i == wrong and author == SLIP:
            result = _slip(result, rng)
        replaced[step.result] = result
        written.append((f"{left}{op}{right}={result}", str(result)))
    return written


def _slip(value: int, rng: random.Random) -> int:
    return max(0, value + rng.choice((-10, -2, -1, 1, 2, 10)))


def _documents(job: tuple[str, int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids [n, LENGTH], prompt lengths and document lengths of a range of the corpus."""
    tokenizer_file, seed, start, stop = job
    encoder = tokenizers.Tokenizer.from_file(tokenizer_file)
    problems = [arithmetic_problem("train", seed, index) for index in range(start, stop)]
    completions = [
        write_solution(problem, random.Random(f"author/{seed}/{start + i}")) + IM_END
        for i, problem in enumerate(problems)
    ]
    prompts = [encoding.ids for encoding in encoder.encode_batch([prompt_text(p.question) for p in problems])]
    answers = [encoding.ids for encoding in encoder.encode_batch(completions)]
    tokens = np.full((len(problems), LENGTH), encoder.token_to_id(END_OF_TEXT), np.int16)
    for row, prompt, answer in zip(tokens, prompts, answers, strict=True):
        row[: len(prompt) + len(answer)] = prompt + answer  # raises where a document is too long
    lengths = np.array([len(prompt) for prompt in prompts])
    return tokens, lengths, lengths + np.array([len(answer) for answer in answers])


def make_corpus(tokenizer_file: Path, seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The corpus, in as many processes as there are cores. Its problems are another stream than the RL run's."""
    chunk = 5000
    jobs = [
        (str(tokenizer_file), 1_000_000 + seed, start, min(start + chunk, count)) for start in range(0, count, chunk)
    ]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        parts = pool.map(_documents, jobs)
    tokens, starts, ends = (np.concatenate(part) for part in zip(*parts, strict=True))
    return tokens[:, : ends.max()], starts, ends


def make_model(size: Size, vocabulary: int) -> transformers.Qwen2ForCausalLM:
    """A randomly initialized Qwen2 with tied head."""
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(IM_END),
        pad_token_id=SPECIAL.index(END_OF_TEXT),
        initializer_range=0.02 * math.sqrt(1024 / size.hidden) / 2,
    )
    return transformers.Qwen2ForCausalLM(config)


def pretrain(model, corpus, steps: int, batch_size: int, learning_rate: float, device: str, seed: int) -> float:
    """Train next-token prediction on the solutions (questions are masked out). Returns the last mean loss."""
    tokens, starts, ends = (torch.from_numpy(array.astype(np.int32)).to(device) for array in corpus)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=device != "cpu")
    warmup = min(300, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 * (1 + math.cos(math.pi * i / steps)))
    )
    generator = torch.Generator(device=device).manual_seed(seed)
    autocast = torch.autocast(device, torch.bfloat16) if device != "cpu" else contextlib.nullcontext()
    model.train()
    began, total = time.perf_counter(), torch.zeros((), device=device)
    for step in range(steps):
        rows = torch.randint(len(tokens), (batch_size,), generator=generator, device=device)
        batch, first, last = tokens[rows].long(), starts[rows, None], ends[rows, None]
        column = torch.arange(batch.shape[1], device=device)
        labels = batch.masked_fill((column < first) | (column >= last), -100)
        with autocast:
            logits = model(input_ids=batch).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.detach()
        if (step + 1) % 250 == 0 or step + 1 == steps:
            done = (step % 250) + 1
            mean, total = float(total) / done, torch.zeros((), device=device)
            print(f"step {step + 1}/{steps}: loss {mean:.4f}, {time.perf_counter() - began:.0f} s", flush=True)
    return mean


def quantized(model) -> transformers.Qwen2ForCausalLM:
    """A copy in fp32 whose projections hold the values of their NVFP4 form, scales shared as in `load_policy`."""
    clone = type(model)(model.config).to(model.device)
    clone.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    for layer in clone.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for fused in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        ):
            arrays = [part.weight.detach().cpu().numpy().astype(ml_dtypes.bfloat16) for part in fused]
            amax = max(nvfp4.max_magnitude(array) for array in arrays)
            divisor = nvfp4.global_scale(amax, arrays[0].dtype)
            for part, array in zip(fused, arrays, strict=True):
                value = np.array(reference.dequantize(nvfp4.quantize(array, divisor)), np.float32)
                part.weight.data.copy_(torch.from_numpy(value))
    return clone.eval()


@torch.no_grad()
def complete(model, tokenizer, questions: list[str], temperature: float, seed: int) -> list[str]:
    """One completion of each question; temperature 0 is greedy."""
    torch.manual_seed(seed)
    texts = [prompt_text(question) for question in questions]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    ids = model.generate(
        **inputs.to(model.device),
        max_new_tokens=64,
        eos_token_id=[SPECIAL.index(IM_END), SPECIAL.index(END_OF_TEXT)],
        pad_token_id=SPECIAL.index(END_OF_TEXT),
        **sampling,
    )
    decoded = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=False)
    return [re.split(r"<\|im_end\|>|<\|endoftext\|>", text)[0] for text in decoded]


FORMAT = re.compile(r"<think>.*?</think>\s*<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def measure(model, tokenizer, count: int = 500, generations: int = 8) -> dict[str, float]:
    """pass@1, pass@8 and format rate at temperature 1, and greedy accuracy, on held-out problems."""
    problems = [arithmetic_problem("heldout", 0, index) for index in range(count)]
    right, formatted = np.zeros((generations, count)), np.zeros((generations, count))
    for i, text in enumerate(complete(model, tokenizer, [p.question for p in problems] * generations, 1.0, 0)):
        match = FORMAT.fullmatch(text)
        formatted.flat[i] = match is not None
        right.flat[i] = match is not None and match[1] == problems[i % count].answer
    greedy = [FORMAT.fullmatch(text) for text in complete(model, tokenizer, [p.question for p in problems], 0.0, 0)]
    greedy_right = [m is not None and m[1] == p.answer for m, p in zip(greedy, problems, strict=True)]
    by_steps = {
        f"pass_at_1_{n}_steps": float(right[:, [len(p.steps) == n for p in problems]].mean()) for n in (2, 3, 4)
    }
    return {
        "problems": count,
        "pass_at_1": float(right.mean()),
        "pass_at_1_numbers": float(right[:, 0::2].mean()),
        "pass_at_1_templates": float(right[:, 1::2].mean()),
        **by_steps,
        f"pass_at_{generations}": float(right.max(0).mean()),
        "format_rate": float(formatted.mean()),
        "greedy_accuracy": float(np.mean(greedy_right)),
        "careful_accuracy": careful_accuracy(model, tokenizer, problems),
    }


@torch.no_grad()
def careful_accuracy(model, tokenizer, problems: list[WordProblem]) -> float:
    """Share of problems whose full worked solution is the greedy choice at every teacher-forced token, with `</think>`
    excluded from the choice: an upper bound of the accuracy that sharpening the policy can reach."""
    texts = [prompt_text(p.question) for p in problems]
    solutions = ["<think>" + "\n".join(map(str, p.steps)) + f"</think><answer>{p.answer}</answer>" for p in problems]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    targets = tokenizer(solutions, return_tensors="pt", padding=True, padding_side="right", return_token_type_ids=False)
    ids = torch.cat([encoded["input_ids"], targets["input_ids"]], 1).to(model.device)
    mask = torch.cat([encoded["attention_mask"], targets["attention_mask"]], 1).to(model.device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    start = encoded["input_ids"].shape[1]
    logits, ids, mask = logits[:, start - 1 : -1], ids[:, start:], mask[:, start:].bool()
    stops = torch.tensor(tokenizer.convert_tokens_to_ids(["</think>"]), device=ids.device)
    logits = logits.index_fill(-1, stops, -1e9)
    wrong = (logits.argmax(-1) != ids) & mask & (ids != stops)
    return 1 - wrong.any(1).float().mean().item()


def save(model, out: Path) -> str:
    """Write config, generation config and bf16 weights; returns the weights' sha256."""
    half = type(model)(model.config)
    half.load_state_dict({name: value.detach().cpu() for name, value in model.state_dict().items()})
    half.to(torch.bfloat16).save_pretrained(out)
    ids = {
        "eos_token_id": [SPECIAL.index(IM_END), SPECIAL.index(END_OF_TEXT)],
        "pad_token_id": SPECIAL.index(END_OF_TEXT),
    }
    (out / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    (out / "model.safetensors").chmod(0o644)
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--problems", type=int, default=400_000, help="size of the corpus")
    args = parser.parse_args()

    began = time.perf_counter()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    questions = [arithmetic_problem("train", 0, index).question for index in range(5000)]
    tokenizer = make_tokenizer(args.out, questions, VOCABULARY, 512)
    corpus = make_corpus(args.out / "tokenizer.json", args.seed, args.problems)
    print(
        f"corpus of {args.problems} documents, longest {corpus[0].shape[1]} tokens, {time.perf_counter() - began:.0f} s"
    )
    model = make_model(SIZES[args.size], len(tokenizer)).to(args.device)
    loss = pretrain(model, corpus, args.steps, args.batch_size, args.learning_rate, args.device, args.seed)
    model.eval()
    accuracy = {"nvfp4": measure(quantized(model), tokenizer), "fp32": measure(model, tokenizer)}
    record = {
        "sha256": save(model, args.out),
        "seed": args.seed,
        "size": args.size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": args.steps,
        "batch_size": args.batch_size,
        "learning_rate": args.learning_rate,
        "problems": args.problems,
        "final_loss": loss,
        "heldout": accuracy,
        "seconds": time.perf_counter() - began,
        "device": torch.cuda.get_device_name() if args.device != "cpu" else f"cpu ({platform.machine()})",
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__},
    }
    (args.out / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
