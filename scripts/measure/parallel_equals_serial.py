#!/usr/bin/env python3
"""Parallel = serial: 1, 2 and 4 ranks at one global batch have the same losses over 50 steps; bit for bit if asked.

How: gpt-nano on text, batch 12 in all, with and without dropout. Plain: losses agree with one rank's to 1e-6 (relative)
at step 1 and to 1e-3 at step 50. With --deterministic every loss, every gradient norm and params_xxh128 are equal.

Usage: parallel_equals_serial.py [TEXT] [--build DIR] [--ranks 1,2,4] [--steps 50]
"""

import sys

import common

FIRST, LAST = 1e-6, 1e-3


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
    p.add_argument("--ranks", default="1,2,4", help="numbers of ranks; the first is compared with (default: 1,2,4)")
    p.add_argument("--steps", default="50")
    options = p.parse_args()
    common.check_text(options)
    ranks = list(map(int, options.ranks.split(",")))
    flags = ["--model", "gpt-nano", "--data", f"text:{options.text}", "--batch-size", 12, "--steps", options.steps]
    good = True
    for deterministic in (False, True):
        for dropout in ("0", "0.1"):
            mode = [*flags, "--set", f"dropout={dropout}", *(["--deterministic"] if deterministic else [])]
            serial = common.train(options, ranks[0], *mode)
            for n in ranks[1:]:
                ok, text = (compare_bits if deterministic else compare_plain)(serial, common.train(options, n, *mode))
                good &= ok
                name = "deterministic" if deterministic else "plain"
                print(f"{name:<14} dropout {dropout:<4} {n} against {ranks[0]}: {text}  {'ok' if ok else 'MISSED'}", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
