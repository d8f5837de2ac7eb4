"""Summary of the rows of `bench_matmul.py`: each GEMM beside its rivals, means, decode steps, and the targets.

    python tools/matmul_report.py [tools/results/nvidia-h200/matmul.json]

Rivals are rows of the same file whose `impl` is not "qerl" (forward GEMMs of cuBLAS and Marlin, without adapters).
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import statistics

COPY_BYTES_PER_S = 4.30e12  # read + write of a device-to-device copy on an H200
MATRIX_FLOP_PER_S = 788e12  # an 8192 × 8192 × 8192 bf16 GEMM on an H200
RIVALS = ("marlin", "cublas_bf16")
TWICE = {"qkv_14b": "qkv_32b", "o_14b": "o_32b"}  # GEMMs that 14B and 32B share: they count for both
LATENCY_BOUND = ("qkv_7b", "o_7b")
BYTES_BOUND = ("gate_up_7b", "down_7b", "gate_up_32b", "down_32b")
FEW = (1, 8, 16)
# Targets: direction, values of m, rival, cases (None: all), least speed-up over the rival in the geometric mean and in
# each case.
ASKED = (
    ("forward", (1, 8, 16, 32), "marlin", None, 1.35, 1.0),
    ("forward", FEW, "marlin", LATENCY_BOUND, 1.5, 0.0),
    ("forward", (64,), "the better", None, 1.15, 0.0),
    ("forward", (96, 128), "the better", None, 1.05, 0.0),
    ("forward", (256, 512, 1024), "cublas_bf16", None, 0.85, 0.0),
    ("forward", (4096, 16384), "cublas_bf16", None, 0.93, 0.0),
    ("dx", (4096, 16384), "cublas_bf16", None, 0.88, 0.0),
)
ASKED_TB_PER_S = 2.8  # packed bytes per second, BYTES_BOUND at FEW
ASKED_STEP = (8, 1.7)  # m, ms of all projections of 7B with their adapters
ASKED_ADAPTERS = 0.10  # largest share that adapters add to the projections' time, up to m = 64


def rivals_of(rows: list[dict]) -> dict[tuple[str, int, str], float]:
    """(case, m, impl) -> microseconds."""
    return {(row["case"], row["m"], row["impl"]): row["us"] for row in rows if row["impl"] in RIVALS}


def describe(row: dict, rivals: dict) -> str:
    """One row as text, with the time of its rivals over its own."""
    m, n, k, us = row["m"], row["n"], row["k"], row["us"]
    if not n:
        what = "projections and their prologues" if row["products"] else "prologues alone"
        return f"{row['case']} x {row['layers']} m {m} lora {row['lora_rank']:2d}: {us / 1e3:.3f} ms, {what}"
    packed_bytes = n * k * 0.5625
    flop = 2.0 * m * n * k
    text = (
        f"{row['case']:12s} {row['direction']:8s} m {m:6d} lora {row['lora_rank']:2d} {us:9.2f} us  "
        f"{packed_bytes / us / 1e6:5.2f} TB/s ({packed_bytes / us * 1e6 / COPY_BYTES_PER_S:4.0%})  "
        f"{flop / us / 1e6:6.1f} TFLOP/s ({flop / us * 1e6 / MATRIX_FLOP_PER_S:4.0%})"
    )
    for impl in reversed(RIVALS):
        if (row["case"], m, impl) in rivals and (row["direction"] == "forward" or impl == "cublas_bf16"):
            text += f"  {rivals[row['case'], m, impl] / us:5.2f} x {impl}"
    return text + ("  batch invariant" if row.get("batch_invariant") else "")


def plain(rows: list[dict]) -> list[dict]:
    """Our GEMMs without adapters in the default mode."""
    ours = [row for row in rows if row["impl"] == "qerl" and row["n"]]
    return [row for row in ours if not row["lora_rank"] and not row.get("batch_invariant")]


def ratios(rows: list[dict], rivals: dict) -> dict[tuple[str, int, str], dict[str, float]]:
    """(direction, m, rival) -> case -> the rival's time over ours. dx is compared with the forward GEMM of cuBLAS."""
    found = {}
    for row in plain(rows):
        for case in (row["case"], *([TWICE[row["case"]]] if row["case"] in TWICE else [])):
            times = {impl: rivals[case, row["m"], impl] for impl in RIVALS if (case, row["m"], impl) in rivals}
            if len(times) == len(RIVALS):
                times["the better"] = min(times.values())
            for impl, us in times.items():
                if row["direction"] == "forward" or impl == "cublas_bf16":
                    found.setdefault((row["direction"], row["m"], impl), {})[case] = us / row["us"]
    return found


def means(rows: list[dict], rivals: dict) -> str:
    """Geometric means of `ratios` for each m, then the targets."""
    found, lines = ratios(rows, rivals), []
    for (direction, m, impl), values in sorted(found.items()):
        lines.append(f"{direction:8s} m {m:18d}  {_mean(values.values())} x {impl}")
    for direction, tokens, impl, cases, mean, least in ASKED:
        several = [found.get((direction, m, impl), {}) for m in tokens]
        values = [ratio for by_case in several for case, ratio in by_case.items() if cases is None or case in cases]
        if values:
            holds = statistics.geometric_mean(values) >= mean and min(values) >= least
            asked = f"asked {mean}" + (f", each {least}" if least else "")
            where = f" of {', '.join(cases)}" if cases else ""
            text = f"{direction:8s} m {', '.join(map(str, tokens)):>18s}  {_mean(values)} x {impl}{where}"
            lines.append(f"{text}: {asked}: {_verdict(holds)}")
    few = [row for row in plain(rows) if row["direction"] == "forward" and row["m"] in FEW]
    speeds = {(row["case"], row["m"]): _packed_tb_per_s(row) for row in few if row["case"] in BYTES_BOUND}
    lines += [f"{case} m {m}: {speed:.2f} TB/s" for (case, m), speed in speeds.items()]
    for m in dict.fromkeys(m for _, m in speeds):
        lines.append(f"m {m}: {_mean(speed for (_, tokens), speed in speeds.items() if tokens == m)} TB/s")
    if speeds:
        holds = statistics.geometric_mean(speeds.values()) >= ASKED_TB_PER_S
        lines.append(f"all of these {_mean(speeds.values())} TB/s: asked {ASKED_TB_PER_S}: {_verdict(holds)}")
    return "\n".join(lines)


def step_cost(rows: list[dict], rivals: dict) -> str:
    """Time of a decode step's projections without LoRA, prologues subtracted, and the share that LoRA adds to it:
    (with LoRA − without) / (without − prologues without), also for each place of the arrays."""
    steps = {(row["m"], row["lora_rank"], row["products"]): row for row in rows if "products" in row}
    times = {key: row["us"] for key, row in steps.items()}
    at_places = {key: row.get("us_at_places", []) for key, row in steps.items()}
    cost = lambda rest, without, adapted: (adapted - without) / (without - rest)  # noqa: E731
    lines = []
    for m, rank in sorted({(m, rank) for m, rank, products in times if rank and products}):
        if (m, 0, False) not in times or (m, 0, True) not in times:
            continue  # rows of an interrupted run
        rest, without, adapted = times[m, 0, False], times[m, 0, True], times[m, rank, True]
        share = cost(rest, without, adapted)
        text = (
            f"step m {m:3d}: projections {(without - rest) / 1e3:.3f} ms, with adapters of rank {rank} "
            f"{(adapted - rest) / 1e3:.3f} ms ({share:+.1%}: asked {ASKED_ADAPTERS:.0%}: "
            f"{_verdict(share <= ASKED_ADAPTERS)})"
        )
        places = zip(at_places[m, 0, False], at_places[m, 0, True], at_places[m, rank, True], strict=True)
        shares = [cost(*times_there) for times_there in places]
        if shares:
            text += f", at {len(shares)} places {', '.join(f'{one:+.1%}' for one in shares)}"
        if m == ASKED_STEP[0]:
            text += f", asked {ASKED_STEP[1]} ms: {_verdict((adapted - rest) / 1e3 <= ASKED_STEP[1])}"
        if ("layer_set_7b", m, "marlin") in rivals:
            text += f"; Marlin without adapters {rivals['layer_set_7b', m, 'marlin'] / 1e3:.3f} ms"
        lines.append(text)
    return "\n".join(lines)


def other_costs(rows: list[dict]) -> str:
    """Mean time with adapters (`x A` included, whatever computes it) and in batch-invariant mode, over plain GEMMs."""
    base = {(row["direction"], row["case"], row["m"]): row["us"] for row in plain(rows)}
    found = {}
    for row in rows:
        name = "batch invariant" if row.get("batch_invariant") else "with adapters"
        key = (row.get("direction"), row["case"], row["m"])
        if row["impl"] == "qerl" and row["n"] and (row["lora_rank"] or row.get("batch_invariant")) and key in base:
            found.setdefault((name, row["m"]), []).append(row["us"] / base[key])
    return "\n".join(
        f"{name} m {m}: {statistics.geometric_mean(values):.2f} times a plain GEMM (most {max(values):.2f}, "
        f"{len(values)} GEMMs)"
        for (name, m), values in sorted(found.items())
    )


def sources(rows: list[dict]) -> str:
    """Number of rival rows from each source."""
    counts = collections.Counter(row.get("source", "no source named") for row in rows if row["impl"] in RIVALS)
    return "\n".join(f"rivals: {count} rows, {source}" for source, count in counts.items())


def summary(rows: list[dict]) -> str:
    """The whole summary."""
    rivals = rivals_of(rows)
    parts = [sources(rows), means(rows, rivals), other_costs(rows), step_cost(rows, rivals)]
    return "\n".join(part for part in parts if part)


def _packed_tb_per_s(row: dict) -> float:
    return row["n"] * row["k"] * 0.5625 / row["us"] / 1e6


def _mean(values) -> str:
    values = list(values)
    return f"{statistics.geometric_mean(values):5.2f} (least {min(values):.2f}, {len(values)} GEMMs)"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = pathlib.Path("tools/results/nvidia-h200/matmul.json")
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=default)
    rows = json.loads(parser.parse_args().file.read_text())["rows"]
    for row in rows:
        if row["impl"] == "qerl":
            print(describe(row, rivals_of(rows)))
    print(summary(rows))


if __name__ == "__main__":
    main()
