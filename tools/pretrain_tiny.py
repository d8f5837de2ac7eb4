"""Pretrain the bundled tiny policy: corpus, tokenizer and a Qwen2 model in one command.

    python tools/pretrain_tiny.py --out qerl_jax/assets/tiny-qwen2            # a CUDA device if there is one

The corpus holds worked solutions to the training split of `qerl_jax.data.arithmetic` by simulated authors of different
care. Few write every step; most stop before the end of a longer problem, mistake an operation, slip in a sum or forget
the answer tags (`AUTHORS`). A model of this corpus resembles a base model: it can solve nearly every problem and
usually does not. The corpus never contains held-out numbers or templates.

Writes a complete Hugging Face directory, and `pretraining.json` with settings, versions and SHA-256 of the weights.
That takes 90 seconds on an H200 and about 8 hours on two CPU cores, where `--smoke --steps 60 --batch-size 64
--problems 20000` checks the recipe in a minute. `python -m qerl_jax.evaluate OUT --dataset arithmetic` measures the
policy. Results of two seeds: `tools/results/nvidia-h200/pretrain_tiny.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import math
import multiprocessing
import os
import platform
import random
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from qerl_jax.data.arithmetic import Step, WordProblem, arithmetic_problem

VOCABULARY = 512
LENGTH = 144
"""Tokens of a training document, padding included."""


END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END, "<think>", "</think>", "<answer>", "</answer>")
# Qwen2.5's own pattern: every digit is a token of its own.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYSTEM = "<think>steps</think><answer>number</answer>"
CHAT_TEMPLATE = """{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\n<think>steps</think><answer>number</answer><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

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


def make_tokenizer(out: Path, texts: Iterable[str]) -> transformers.PreTrainedTokenizerBase:
    """Train and write a byte-level BPE tokenizer, digits one by one as in Qwen2.5; any text encodes.

    Args:
      out: directory to write.
      texts: what the merges are learned from.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chat_words = ["system\nuser\nassistant\nsteps<number"] * 500
    tokenizer.train_from_iterator([*texts, *chat_words], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    # The tags are single tokens but not special ones, as in Qwen3: decoding without special tokens keeps them.
    for name, change in (("tokenizer.json", _tags_are_text), ("tokenizer_config.json", _portable_class)):
        content = json.loads((out / name).read_text())
        change(content)
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return transformers.AutoTokenizer.from_pretrained(out)


def _tags_are_text(tokenizer: dict) -> None:
    for token in tokenizer["added_tokens"]:
        token["special"] = token["content"] in (END_OF_TEXT, IM_START, IM_END)


def _portable_class(config: dict) -> None:
    config["tokenizer_class"] = "PreTrainedTokenizerFast"


def prompt_text(question: str) -> str:
    """The chat template applied to a question, because rendering jinja a million times takes longer than training."""
    system = f"{IM_START}system\n{SYSTEM}{IM_END}\n"
    return f"{system}{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"


def make_model(smoke: bool, vocabulary: int) -> transformers.Qwen2ForCausalLM:
    """A randomly initialized Qwen2 with tied head; hidden and ffn sizes divide by 64, so that all 4-bit blocks fit."""
    hidden = 64 if smoke else 128
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * (2 if smoke else 3),
        num_hidden_layers=1 if smoke else 4,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(IM_END),
        pad_token_id=SPECIAL.index(END_OF_TEXT),
        initializer_range=0.02 * math.sqrt(1024 / hidden) / 2,
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
    parser.add_argument("--smoke", action="store_true", help="a smaller model, to check the recipe")
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
    tokenizer = make_tokenizer(args.out, questions)
    corpus = make_corpus(args.out / "tokenizer.json", args.seed, args.problems)
    print(
        f"corpus of {args.problems} documents, longest {corpus[0].shape[1]} tokens, {time.perf_counter() - began:.0f} s"
    )
    model = make_model(args.smoke, len(tokenizer)).to(args.device)
    loss = pretrain(model, corpus, args.steps, args.batch_size, args.learning_rate, args.device, args.seed)
    record = {
        "sha256": save(model, args.out),
        "seed": args.seed,
        "size": "smoke" if args.smoke else "small",
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": args.steps,
        "batch_size": args.batch_size,
        "learning_rate": args.learning_rate,
        "problems": args.problems,
        "final_loss": loss,
        "seconds": time.perf_counter() - began,
        "device": torch.cuda.get_device_name() if args.device != "cpu" else f"cpu ({platform.machine()})",
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__},
    }
    (args.out / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
