#!/usr/bin/env python3
"""Parallel = serial: every strategy and number of ranks has the same losses over 50 steps; bit for bit if asked.

How: gpt-nano on text, batch 16 in all, with and without dropout. Plain: losses agree with one rank's to 1e-6 (relative)
at step 1 and to 1e-3 at step 50. With --deterministic every loss, every gradient norm and params_xxh128 are equal under
strategies that keep contractions whole (ddp, fsdp, hsdp), and under tp and fsdp+tp with --exact-contraction. Compiled
runs, one rank's too, are held to the plain limits against one eager rank, and compiled deterministic ones to its bits. Parameters as they are drawn have one hash under all.

Usage: parallel_equals_serial.py [TEXT] [--build DIR] [--steps 50] [--modes plain,compiled]
"""

import sys

import common

FIRST, LAST = 1e-6, 1e-3
SPREADS = [
    (2, []),
    (4, []),
    (2, ["--strategy", "fsdp"]),
    (4, ["--strategy", "fsdp"]),
    (4, ["--strategy", "hsdp", "--mesh", "replicate=2,shard=2"]),
    (2, ["--strategy", "tp"]),
    (4, ["--strategy", "tp"]),
    (4, ["--strategy", "fsdp+tp", "--mesh", "dp=2,tp=2"]),
    (8, ["--strategy", "hsdp+tp", "--mesh", "replicate=2,shard=2,tp=2"]),
    (2, ["--strategy", "pp", "--accumulate", "4"]),
    (4, ["--strategy", "pp", "--accumulate", "4"]),
    (4, ["--strategy", "pp", "--mesh", "dp=2,pp=2", "--accumulate", "2"]),
]


def compare_plain(serial, parallel):
    def difference(step):
        a, b = serial[0][step]["loss"], parallel[0][step]["loss"]
        return abs(a - b) / abs(a)

    first, last = difference(0), difference(-1)
    return first <= FIRST and last <= LAST, f"step 1 differs by {first:.1e} (limit {FIRST:.0e}), the last by {last:.1e} (limit {LAST:.0e})"


def compare_bits(serial, parallel):
    def numbers(run):
        return [(line["loss"], line["grad_norm"]) for line in run[0]]

    same_losses = numbers(serial) == numbers(parallel)
    hashes = serial[1]["params_xxh128"], parallel[1]["params_xxh128"]
    text = f"losses {'equal' if same_losses else 'DIFFER'}, parameters {hashes[1]}"
    return same_losses and hashes[0] == hashes[1], text


def main():
    p = common.parser(__doc__)
    common.add_text_argument(p)
    p.add_argument("--steps", default="50")
    p.add_argument("--modes", help="plain,deterministic,exact,compiled,compiled bits; all by default")
    options = p.parse_args()
    common.check_text(options)
    data = ["--model", "gpt-nano", "--data", f"text:{options.text}", "--batch-size", 16]
    flags = [*data, "--steps", options.steps]
    good = True
    drawn = common.train(options, 1, *data, "--steps", 0)[1]["params_xxh128"]
    for ranks, spread in SPREADS:
        same = common.train(options, ranks, *data, "--steps", 0, *spread)[1]["params_xxh128"] == drawn
        good &= same
        print(f"{'as drawn':<14} {ranks} {' '.join(spread)}: parameters {'equal  ok' if same else 'DIFFER  MISSED'}", flush=True)
    whole = ["--deterministic"]
    modes = {  # what every run of the mode has, what only those that are compared with one rank have
        "plain": ([], []),
        "deterministic": (whole, []),
        "exact": ([*whole, "--exact-contraction"], []),
        "compiled": ([], ["--compile"]),
        "compiled bits": (whole, ["--compile"]),
    }
    for name, (extra, parallel_only) in modes.items():
        if options.modes and name not in options.modes.split(","):
            continue
        for dropout in ("0", "0.1"):
            mode = [*flags, "--set", f"dropout={dropout}", *extra]
            serial = common.train(options, 1, *mode)
            for ranks, spread in SPREADS + ([(1, [])] if parallel_only else []):
                how = " ".join(spread) or "--strategy ddp"
                if extra and "pp" in spread or name in ("deterministic", "compiled bits") and "tp" in how:
                    continue  # equal to rounding only
                run = common.train(options, ranks, *mode, *parallel_only, *spread)
                ok, text = (compare_bits if extra else compare_plain)(serial, run)
                good &= ok
                print(f"{name:<14} dropout {dropout:<4} {ranks} ranks {how}: {text}  {'ok' if ok else 'MISSED'}", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
