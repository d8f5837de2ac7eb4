"""`python -m qerl_jax.export RUN OUT --as KIND`: a trained policy as a PEFT adapter, for vLLM, or as one model.

All forms are written tensor by tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from qerl_jax import command
from qerl_jax.atomic import atomic_directory
from qerl_jax.backends.vllm_settings import RANKS
from qerl_jax.checkpoint import hf_config
from qerl_jax.checkpoint.adapter import write_adapter
from qerl_jax.checkpoint.adapter_reader import AdapterReader, trained_base, trained_format
from qerl_jax.checkpoint.check import check_names
from qerl_jax.checkpoint.load import accepted_quantization
from qerl_jax.checkpoint.of_run import (
    Source,
    base_note,
    find_source,
    loaded_format,
    write_trained_adapter,
)
from qerl_jax.checkpoint.policy_tensors import dense_tensors, replaced
from qerl_jax.checkpoint.quantize import write_quantized
from qerl_jax.checkpoint.run_files import ADAPTER_DIR
from qerl_jax.checkpoint.safetensors import Tensors, model_fingerprint, open_checkpoint
from qerl_jax.checkpoint.tokenizer import TOKENIZER_FILES, load_tokenizer, refuse_other_tokenizer
from qerl_jax.checkpoint.write import ADAPTER_PART, BASE_PART, check_output, write_checkpoint
from qerl_jax.config import Config, ConfigError, flags
from qerl_jax.data.files import DataError
from qerl_jax.data.presets import PRESETS
from qerl_jax.data.problems import BUNDLED, check_dataset, own_system_prompt
from qerl_jax.data.prompts import asks_for_answer
from qerl_jax.messages import IN_MEMORY, shown
from qerl_jax.models.formats import WEIGHT_FORMATS
from qerl_jax.reporting.console import say

KINDS = ("peft", "vllm", "merged")
_OF_EVALUATION = {
    "num_generations": "eval_num_generations",
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
} | {
    name: name
    for name in (
        *("prompt_column", "answer_column", "system_prompt", "prompt_format", "overlong_prompts"),
        *("dtype", "seed"),
    )
}
"""Flags of an evaluation, and the fields of a run that they continue."""
Progress = Callable[[int, int], None]
"""Called with the numbers of tensors done and of all."""

_CARD = "README.md"  # the base's, which does not describe what was trained
_QUANTIZATION_FILES = ("hf_quant_config.json", "recipe.yaml")  # ModelOpt's and llm-compressor's, besides config.json


def export(
    directory: Path,
    out: Path,
    kind: str = "peft",
    base: str | None = None,
    weight_format: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Write a policy in one atomic step.

    Args:
      directory: a run, or an adapter.
      out: directory to write.
      kind: one of `KINDS`. "peft": the adapter with its norms. "vllm": its LoRA, and the base with its norms in fp32
        where that is not the original one. "merged": one bf16 model, `W + scale · B A` computed in fp32 and rounded
        once.
      base: model that the adapter belongs to, as in `Config.model`; for a run None: its own.
      weight_format: format into which the base was quantized while loading; None: the one of the training.
      overwrite: replace an earlier export.
      say: called with each line for people.
      progress: called with the numbers of tensors done and of all.

    Returns the commands that use it.

    Raises:
      ConfigError: another `kind`, nothing to export (`checkpoint.of_run.find_source`).
      FileExistsError: `out` exists, without `overwrite`; or it is or holds a source, or is no export.
      CheckpointError: an adapter or tokenizer that is not the base's, or a damaged file; nothing is at `out` then.
    """
    if kind not in KINDS:
        raise ConfigError(f"--as {shown(kind)} is not one of {list(KINDS)}")
    source = find_source(directory, base, weight_format)
    check_output([source.base, directory, directory / ADAPTER_DIR], out, overwrite, adapters=True)
    model, quantization = source.model, accepted_quantization(source.base, source.weight_format)
    check_names(open_checkpoint(source.base), model, quantization)
    with tempfile.TemporaryDirectory() as temporary, atomic_directory(out) as building:
        if source.step is not None:
            say(f"exporting the newest checkpoint of {directory}, of step {source.step}")
        if kind != "peft" and (message := _system_message(source)):
            say(f"requests need the system message of the training: {message!r}")
        if source.adapter is None:
            write_trained_adapter(source, Path(temporary))
            source = dataclasses.replace(source, adapter=Path(temporary))
        refuse_other_tokenizer(source.base, source.adapter)
        reader = AdapterReader(source.adapter, source.model)
        if note := base_note(source.adapter, source.base, source.weight_format):
            say(note)
        if kind == "peft":
            if source.quantizes:
                trained = source.weight_format.upper()
                say(f"peft puts it on unquantized weights, not on those in {trained}: vllm and merged have them")
            _write_peft(source, reader, building)
        elif kind == "vllm":
            _write_vllm(source, reader, building, out, progress)
        else:
            _write_merged(source, reader, building, progress)
        return _commands(kind, source, reader, out)


def _system_message(source: Source) -> str:
    """That of a run's prompts, "" for none; of several datasets that of the first."""
    if source.config is None or source.config.system_message is not None:
        return source.config.system_message if source.config else ""
    preset = source.config.dataset[0].partition(":")[0]
    asks_itself = asks_for_answer(load_tokenizer(source.base, source.model.vocab_size))
    return own_system_prompt(preset if preset in PRESETS else BUNDLED, asks_itself)


def _write_merged(source: Source, reader: AdapterReader, directory: Path, progress: Progress) -> None:
    """The base with the adapter merged into it, in bf16."""
    dense = dense_tensors(source.base, source.weight_format, reader)
    _write_model(source.base, directory, replaced(dense, reader.norm_tensors(), ml_dtypes.bfloat16), progress)


def _write_peft(source: Source, reader: AdapterReader, directory: Path) -> None:
    """The adapter with its norms, and the base's tokenizer."""
    tensors, trained_on = (reader.lora_tensors(), reader.norm_tensors()), trained_format(source.adapter)
    write_adapter(directory, reader.config, *tensors, source.base_model, trained_on, trained_base(source.adapter))
    for name in TOKENIZER_FILES:
        if (source.base / name).is_file():
            shutil.copyfile(source.base / name, directory / name)


def _write_vllm(source: Source, reader: AdapterReader, directory: Path, final: Path, progress: Progress) -> None:
    """The LoRA alone, and the base with the adapter's norms; the base only where it is not the original one."""
    base_model, norms = source.base_model, reader.norm_tensors()
    weight_format, fingerprint = trained_format(source.adapter), trained_base(source.adapter)
    if norms or source.quantizes:
        base_model = str(final.absolute() / BASE_PART)
        (directory / BASE_PART).mkdir()
        _write_base(source, norms, directory / BASE_PART, progress)
        weight_format = loaded_format(directory / BASE_PART, None)
        fingerprint = model_fingerprint(directory / BASE_PART)
    (part := directory / ADAPTER_PART).mkdir()
    lora = reader.lora_tensors()
    write_adapter(part, reader.config, lora, {}, base_model, weight_format, fingerprint, source.base_model)


def _write_base(source: Source, norms: Mapping[str, np.ndarray], directory: Path, progress: Progress) -> None:
    """The base as the policy has it: quantized if it was while loading, with the adapter's norms in fp32."""
    if source.quantizes and source.weight_format != "nvfp4":  # other formats: their values, in bf16
        tensors = replaced(dense_tensors(source.base, source.weight_format), norms)
        _write_model(source.base, directory, tensors, progress)
        return
    tensors = replaced(open_checkpoint(source.base), norms)
    config = hf_config.read_json(source.base / "config.json")
    if source.quantizes:
        write_quantized(source.base, directory, tensors, config, source.model, "nvfp4", progress, (_CARD,))
    else:
        _write_model(source.base, directory, tensors, progress, config, (_CARD,))


def _write_model(
    base: Path,
    directory: Path,
    tensors: Tensors,
    progress: Progress,
    config: dict[str, Any] | None = None,
    leave_out: Container[str] = (_CARD, *_QUANTIZATION_FILES),
) -> None:
    """A checkpoint with the base's other files. `config`: its config.json; None: the base's, in bf16."""
    if config is None:
        config = hf_config.read_json(base / "config.json")
        config.pop("quantization_config", None)
        config |= dict.fromkeys([key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"], "bfloat16")
    write_checkpoint(base, directory, tensors, config, progress=progress, leave_out=leave_out)


def _commands(kind: str, source: Source, reader: AdapterReader | None, out: Path) -> list[str]:
    """Commands that use an export, for a shell."""
    place = shlex.quote(str(out))
    if kind == "merged":
        return [f"vllm serve {place}", f"python -m qerl_jax.quantize {place} {shlex.quote(f'{out}-nvfp4')}"]
    if kind == "peft":
        words = ["python", "-m", "qerl_jax.evaluate", source.base_model]
        words += ["--weight-format", source.weight_format] if source.quantizes else []
        chosen, note = ([], "") if source.config is None else _evaluation(source.config)
        return [shlex.join([*words, *chosen, "--adapter", str(out)]) + note]
    has_base = reader.has_norms or source.quantizes
    served = f"{place}/{BASE_PART}" if has_base else shlex.quote(source.base_model)
    rank = next((rank for rank in RANKS if rank >= reader.config.rank), reader.config.rank)
    return [f"vllm serve {served} --enable-lora --max-lora-rank {rank} --lora-modules trained={place}/{ADAPTER_PART}"]


def _evaluation(config: Config) -> tuple[list[str], str]:
    """Flags of an evaluation with a run's own prompts, limits and sampling, and a comment on those to fill in."""
    words, missing, defaults = [], [], Config()
    on_disk = [name for name in (config.eval_dataset, *config.dataset) if name and name not in IN_MEMORY]
    presets = [PRESETS.get(name.partition(":")[0]) for name in on_disk]
    known = [name for name, preset in zip(on_disk, presets, strict=True) if preset is None or preset.answers]
    words += ["--dataset", known[0] if known else "FILE"]
    if not known:
        instead = f"{on_disk[0]}, which has none" if on_disk else "the run's records in memory"
        missing.append(f"FILE: problems with answers, in place of {instead}")
    elif _has(known[0], "train") and not _has(known[0], "test"):
        words += ["--split", "train"]
    if config.eval_dataset in known:
        words += ["--samples", str(config.eval_samples)]
    for name in ("max_prompt_length", "max_completion_length"):  # whose defaults are others there
        words += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    for name, field in _OF_EVALUATION.items():
        value = getattr(config, field)
        if value != getattr(defaults, field) and not (name == "prompt_format" and config.system_prompt is not None):
            if (name, value) == ("answer_column", ""):
                value = "COLUMN"
                missing.append("COLUMN: the column of the answers, as the run had none")
            flag, text = f"--{name.replace('_', '-')}", str(value)
            words += [f"{flag}={text}"] if text.startswith("--") else [flag, text]
    return words, f"  # {'; '.join(missing)}" if missing else ""


def _has(dataset: str, split: str) -> bool:
    with contextlib.suppress(DataError):
        check_dataset(dataset, split)
        return True
    return False


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Export a trained policy: as a PEFT adapter, for vLLM, or merged into one model."""

    run: str
    """Directory of a run, or of an adapter."""
    out: str
    """Directory to write, in one atomic step."""
    base: str | None = None
    """Model that an adapter belongs to: Hugging Face directory, ORGANIZATION/NAME on the hub, or "tiny". None: the
    run's; for a run that was moved away from its model, the model's new place."""
    weight_format: Literal[*WEIGHT_FORMATS] | None = None
    """Format into which an unquantized base was quantized while loading. None: the run's, which an adapter names."""
    overwrite: bool = False
    """Replace out if it is an earlier export."""


def _arguments() -> type:
    """`_Arguments` with the flag `--as`, which is no name in Python."""
    from typing import Annotated

    import tyro

    text = (
        "peft: adapter; vllm: LoRA, and where it differs from the original the base it belongs to; merged: one bf16 "
        "model, of which `python -m qerl_jax.quantize` makes NVFP4, MXFP4 or NF4."
    )
    field = ("kind", Annotated[str, tyro.conf.arg(name="as", help=text)], dataclasses.field(default="peft"))
    return dataclasses.make_dataclass("Arguments", [field], bases=(_Arguments,), frozen=True)


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 2 and a one-line error message for bad input."""
    return command.run(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "interrupted; nothing was written")


def _run(argv: Sequence[str]) -> int:
    arguments = flags.parse(
        _arguments(), argv, "python -m qerl_jax.export", inspect.getdoc(_Arguments), renamed={"as": "kind"}
    )
    from qerl_jax.reporting.progress import tensor_bar

    with tensor_bar() as bar:
        task = bar.add_task("writing tensors", visible=False)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        use = export(
            Path(arguments.run),
            Path(arguments.out),
            arguments.kind,
            arguments.base,
            arguments.weight_format,
            arguments.overwrite,
            lambda line: say(bar.console, line),
            progress,
        )
    print("\n".join([f"wrote {arguments.out}; use it with", *(f"  {line}" for line in use)]))
    return 0


if __name__ == "__main__":
    command.end(main)
