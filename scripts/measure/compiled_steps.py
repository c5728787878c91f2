#!/usr/bin/env python3
"""Compiled training steps: how long they take over their bare products, and how long compiling took, cold and warm.

How: `bench train --compile` of each model twice, on one core, the first time with an empty cache for compiled kernels and
the second time with what the first has left there. The step, eager and compiled, and the products and convolutions that it
is made of, each called by itself in the same layouts, are timed in turn in the second run.

Usage: compiled_steps.py [--build DIR] [--models gpt2,resnet50] [--precision fp32,bf16] [--samples 9] [--json FILE]
                         [--results FILE]
With --results, finished rows of the same program and options are kept in that file and not taken again.
Ends with status 1 where GPT-2 takes longer than 3 s cold or 0.1 s warm to compile, or where a compiled step of
BERT-base or ResNet-50 takes more than 1.1 times as long as its bare products.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import common

MODELS = "gpt-nano,gpt2,bert-base,resnet50,mlp"
LIMITS = {
    "gpt2": {"cold_s": 3, "warm_s": 0.1},
    "bert-base": {"compiled_over_contractions": 1.1},
    "resnet50": {"compiled_over_contractions": 1.1},
}


def bench(options, model, precision, cache):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.json"
        command = [common.program(options, "bench"), "train", "--model", model, "--precision", precision, "--compile"]
        command += ["--samples", str(options.samples), "--warmup", "2", "--json", str(path)]
        command += ["--cpu-time"] if options.cpu_time else []
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TESSERA_COMPILE_CACHE": cache})
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        return json.loads(path.read_text())["result"]


def measure(options, model, precision):
    with tempfile.TemporaryDirectory() as cache:
        cold = bench(options, model, precision, cache)
        warm = bench(options, model, precision, cache)
    return {
        "model": model,
        "precision": precision,
        "step_ms": warm["step_ms"]["median"],
        "compiled_step_ms": warm["compiled_step_ms"]["median"],
        "contractions_ms": warm["contractions_ms"]["median"],
        "step_over_contractions": warm["step_over_contractions"],
        "compiled_over_contractions": warm["compiled_over_contractions"],
        "cold_s": cold["compile_s"],
        "warm_s": warm["compile_s"],
    }


def main():
    p = common.parser(__doc__)
    p.add_argument("--models", default=MODELS, help=f"of bench train (default: {MODELS})")
    p.add_argument("--precision", default="fp32,bf16")
    p.add_argument("--samples", type=int, default=9, help="of each step (default: 9)")
    p.add_argument("--cpu-time", action="store_true", help="count the thread's own time, where others use the machine")
    p.add_argument("--json", type=Path)
    p.add_argument("--results", type=Path, metavar="FILE", help="finished rows are kept here, and not taken again")
    options = p.parse_args()
    of = {"program": common.digest(common.program(options, "bench")), "samples": options.samples, "cpu_time": options.cpu_time}
    kept = common.Kept(options.results, of) if options.results else None
    done = {(row["model"], row["precision"]): row for row in kept.parts} if kept else {}
    print(common.load())
    print(f"{'':<18}{'step ms':>10}{'compiled':>10}{'bare':>10}{'step/bare':>11}{'compiled/bare':>15}{'cold s':>9}{'warm s':>9}")
    rows, missed = [], []
    for model in options.models.split(","):
        for precision in options.precision.split(","):
            row = done.get((model, precision)) or measure(options, model, precision)
            if kept and (model, precision) not in done:
                kept.add(row)
            rows.append(row)
            print(
                f"{model + ' ' + precision:<18}{row['step_ms']:>10.2f}{row['compiled_step_ms']:>10.2f}{row['contractions_ms']:>10.2f}"
                f"{row['step_over_contractions']:>11.3f}{row['compiled_over_contractions']:>15.3f}{row['cold_s']:>9.2f}{row['warm_s']:>9.3f}",
                flush=True,
            )
            missed += [f"{model} {precision}: {key} {row[key]:.3f}, limit {limit}" for key, limit in LIMITS.get(model, {}).items() if row[key] > limit]
    if options.json:
        options.json.write_text(json.dumps({"load": common.load(), "rows": rows}, indent=2) + "\n")
    for line in missed:
        print(f"compiled_steps.py: {line}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
