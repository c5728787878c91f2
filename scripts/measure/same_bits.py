#!/usr/bin/env python3
"""Same bits: one build trains every model to the parameters of another build, bit for bit.

How: gpt-nano on text, the other models on random values, some steps with --deterministic, under every strategy of --spreads,
in fp32 and bf16, eager and compiled. Each run of both builds reports params_xxh128, the hash of all parameters in the order of
their names; a run passes where the two are equal. Both builds belong on one machine: kernels are chosen by its processor.
Finished runs are kept in --results, and not taken again.

Usage: same_bits.py --build FIRST --build SECOND [TEXT] [--steps 4] [--models mlp] [--json FILE] [--results FILE]
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import common
from parallel_equals_serial import MODELS

SPREADS = {  # strategy -> ranks and flags
    "one": (1, []),
    "ddp": (2, ["--strategy", "ddp"]),
    "fsdp": (2, ["--strategy", "fsdp"]),
    "tp": (2, ["--strategy", "tp"]),
    "hsdp+tp": (8, ["--strategy", "hsdp+tp", "--mesh", "replicate=2,shard=2,tp=2"]),
}
PRECISIONS = {"fp32": [], "bf16": ["--precision", "bf16"]}
MODES = {"eager": [], "compiled": ["--compile"]}


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    common.add_text_argument(p)
    p.add_argument("--build", action="append", type=Path, help="build folder; given twice, the second is compared with the first")
    p.add_argument("--steps", type=int, default=4, help="of each run (4)")
    p.add_argument("--models", default=",".join(MODELS), help=f"all by default: {','.join(MODELS)}")
    p.add_argument("--spreads", default=",".join(SPREADS), help=f"all by default: {','.join(SPREADS)}")
    p.add_argument("--json", type=Path, help="what every run gave")
    p.add_argument("--results", type=Path, metavar="FILE", help="finished runs are kept here, and not taken again")
    options = p.parse_args(argv)
    if len(options.build or []) != 2:
        p.error("expected --build twice")
    for given, known in ((options.models, MODELS), (options.spreads, SPREADS)):
        for name in given.split(","):
            if name not in known:
                p.error(f"{name}: expected one of {', '.join(known)}")
    common.check_text(options)
    return options


def hash_of(build, options, model, spread, precision, mode):
    ranks, flags = SPREADS[spread]
    task = ["--model", model, *MODELS[model], *(["--data", f"text:{options.text}"] if model == "gpt-nano" else [])]
    command = [*task, "--steps", options.steps, "--deterministic", *flags, *PRECISIONS[precision], *MODES[mode]]
    return common.train(argparse.Namespace(build=build), ranks, *command)[1]["params_xxh128"]


def main():
    options = parse()
    kept = None
    if options.results:
        programs = [common.digest(common.program(argparse.Namespace(build=b), "train")) for b in options.build]
        kept = common.Kept(options.results, {"programs": programs, "steps": options.steps})
    done = {tuple(part["run"]): part for part in kept.parts} if kept else {}
    runs = []
    for run in itertools.product(options.models.split(","), options.spreads.split(","), PRECISIONS, MODES):
        part = done.get(run)
        if part is None:
            part = {"run": run, "hashes": [hash_of(build, options, *run) for build in options.build]}
            if kept:
                kept.add(part)
        runs.append(part)
        first, second = part["hashes"]
        model, spread, precision, mode = run
        verdict = f"{first}  equal" if first == second else f"{first} {second}  DIFFER"
        print(f"{model:<10} {spread:<8} {precision:<5} {mode:<9} {verdict}", flush=True)
    differ = sum(part["hashes"][0] != part["hashes"][1] for part in runs)
    print(f"{len(runs)} runs of {options.steps} steps, {differ} differ")
    if options.json:
        options.json.write_text(json.dumps({"steps": options.steps, "runs": runs}, indent=2) + "\n")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
