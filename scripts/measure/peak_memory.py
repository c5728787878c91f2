#!/usr/bin/env python3
"""Peak memory of a training step beside PyTorch's: the process's high-water mark after the steps of one row.

How: each row runs alone in a fresh process, ours (`bench serve`) and PyTorch's (scripts/reference/bench_train.py), the same
work as compare_pytorch.py times. The kernel's VmHWM is read once a sample is done; beside it stands how much of it came after
start-up, when the program and its libraries were there and no model yet. Ends with a non-zero status when one of ours is
higher than PyTorch's.

Usage: peak_memory.py --python NAME=INTERPRETER [--python ...] [--build DIR] [--only bert,resnet50_bf16] [--json FILE]
"""

import json
import sys
from pathlib import Path

import common
from compare_pytorch import ROWS, Server, program_of

TRAINING = list(dict.fromkeys((ours, theirs) for ours, script, theirs in ROWS if script == "bench_train.py"))


def status_mib(server, field):
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    sys.exit(f"/proc/{server.process.pid}/status has no {field}")


def peak(command, name):
    """(peak, growth since start-up) in MiB, or None where the program does not have the row."""
    server = Server(command)
    measured = None
    if name in server.header["names"]:
        before = status_mib(server, "VmRSS")
        server.sample(name)
        high = status_mib(server, "VmHWM")
        measured = high, high - before
    server.close()
    return measured


def main():
    p = common.parser(__doc__)
    p.add_argument("--python", action="append", required=True, metavar="NAME=INTERPRETER", help="a Python that has PyTorch")
    p.add_argument("--only", help="our names, as in step,bert_bf16")
    p.add_argument("--json", type=Path)
    options = p.parse_args()
    rows, ours = [], {}
    reference = str(common.ROOT / "scripts" / "reference" / "bench_train.py")
    print("MiB at the peak (of them since start-up)")
    for choice in options.python:
        name, _, interpreter = choice.partition("=")
        if not interpreter:
            p.error(f"--python {choice}: expected NAME=INTERPRETER")
        for our_name, their_name in TRAINING:
            if options.only and our_name not in options.only.split(","):
                continue
            theirs = peak([interpreter, reference, "--serve"], their_name)
            if theirs is None:
                continue
            if our_name not in ours:
                ours[our_name] = peak([program_of(options), "serve"], our_name)
            a, b = ours[our_name], theirs
            what = f"{our_name}, {their_name} of PyTorch {name}"
            print(f"{what:<46} {a[0]:7.0f} ({a[1]:.0f})  {b[0]:7.0f} ({b[1]:.0f})  {a[0] / b[0]:.2f}", flush=True)
            rows.append({"what": what, "tessera_mib": a, "other_mib": b, "ratio": a[0] / b[0]})
    if options.only and not rows:
        p.error(f"--only {options.only}: no such row, one of {', '.join(dict.fromkeys(o for o, _ in TRAINING))}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    higher = [row["what"] for row in rows if row["ratio"] > 1]
    if higher:
        sys.exit(f"higher than PyTorch's: {'; '.join(higher)}")


if __name__ == "__main__":
    main()
