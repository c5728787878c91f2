#!/usr/bin/env python3
"""Speed against PyTorch: the same work timed in turn (A B A B) on one core or one card by `bench serve` and by scripts/reference.

How: both programs stay alive and are bound to the same core; a sample of one is followed by a sample of the other. Printed
are medians, the ratio of medians and its 95 % bootstrap interval over pairs. PyTorch runs with the settings of
scripts/reference/bench_common.py (one thread, tuned libraries). AdamW is compared with each kind that PyTorch has. Beside
training steps stand the GF/s of their matrix products and convolutions, counted as plain sums take them (also those of rows
that are zero, which Tessera leaves out, and of 3 x 3, where it multiplies less), and what share that is of the most that the
core did when measured after each row, in that precision; on a card the most that a product of large squares does.

Usage: compare_pytorch.py --python NAME=INTERPRETER [--python ...] [--build DIR] [--pairs 11] [--only step,add] [--json FILE]
                          [--device cpu|cuda|cuda:N]
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import common

OPS = ["add", "add_grad", "view", "transpose", "matmul_64", "matmul_256", "matmul_1024", "matmul_2048", "matmul_1024_bf16"]
OPS += ["matmul_2048_bf16", "matmul_batched", "linear_skinny", "conv3x3", "conv3x3_nchw", "conv3x3_bf16", "conv3x3_nchw_bf16"]
OPS += ["add_large", "gelu_large", "softmax_large", "layer_norm_large"]
OPS += ["attention", "attention_grad", "attention_bf16", "attention_grad_bf16"]
# (our name, program, PyTorch's name)
MODELS = ["step", "gpt2", "mlp", "bert", "bert512", "resnet50"]
ROWS = [
    (f"{model}{precision}{ours}", "bench_train.py", f"{model}{precision}{theirs}")
    for model in MODELS
    for precision in ("", "_bf16")
    for ours, theirs in (("", ""), ("", "_compiled"), ("_compiled", ""), ("_compiled", "_compiled"))
] + [
    ("cross_entropy", "bench_ops.py", "cross_entropy"),
    ("adamw", "bench_ops.py", "adamw"),
    ("adamw", "bench_ops.py", "adamw_foreach"),
    ("adamw", "bench_ops.py", "adamw_fused"),
    *[(name, "bench_ops.py", name) for name in OPS],
]


class Server:
    """A program that times one sample for each line it is sent."""

    def __init__(self, command, environment=None):
        self.command = command
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.header = self.answer()
        self.gflop = None  # of the last sample, where it is counted

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            why = self.process.stderr.read().strip()
            sys.exit(f"{' '.join(self.command)}: ended with status {self.process.returncode}: {why}")
        return json.loads(line)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def sample(self, name):
        answer = self.ask(f"go {name}")
        if "ms" not in answer:
            sys.exit(f"{' '.join(self.command)}: {answer}")
        self.gflop = answer.get("gflop")
        return answer["ms"]

    def close(self):
        self.process.stdin.write("quit\n")
        self.process.stdin.close()
        self.process.wait()


def in_turn(a, name_a, b, name_b, pairs):
    a.sample(name_a), b.sample(name_b)  # warm-up
    times = [(a.sample(name_a), b.sample(name_b)) for _ in range(pairs)]
    a.ask("free"), b.ask("free")
    return [t[0] for t in times], [t[1] for t in times]


def duration(ms):
    return f"{ms * 1e6:.0f} ns" if ms < 1e-3 else f"{ms * 1e3:.1f} us" if ms < 1 else f"{ms:.2f} ms"


def print_row(what, ours, theirs, gflop=None, peak=None):
    """`peak` in GF/s; both rates are printed where the work is counted."""
    ratio, low, high = common.ratio_interval(theirs, ours)
    medians = statistics.median(ours), statistics.median(theirs)
    row = {"what": what, "tessera_ms": medians[0], "other_ms": medians[1], "ratio": ratio, "interval": [low, high]}
    text = f"{what:<34} {duration(medians[0]):>12} {duration(medians[1]):>12} {ratio:>7.2f}x   [{low:.2f}, {high:.2f}]"
    if gflop and peak:
        rates = [gflop / ms * 1e3 for ms in medians]
        text += "   " + " and ".join(f"{rate:.0f} GF/s ({rate / peak:.0%})" for rate in rates) + f" of {peak:.0f}"
        row |= {"gflop": gflop, "tessera_gflops": rates[0], "other_gflops": rates[1], "peak_gflops": peak}
    print(text, flush=True)
    return row


def compare(options, name, interpreter):
    """Rows against one PyTorch. One reference program lives at a time, beside ours."""
    rows, ours, theirs, script = [], our_server(options), None, None
    peaks = ours.ask("peak")
    for our_name, program, their_name in ROWS:
        if options.only and our_name not in options.only.split(","):
            continue
        if program != script:
            if theirs:
                theirs.close()
            path = common.ROOT / "scripts" / "reference" / program
            theirs, script = Server([interpreter, str(path), "--serve", *device_flags(options)]), program
        if their_name in theirs.header["names"]:
            what = f"{our_name}, {their_name} of PyTorch {theirs.header['torch']}"
            times = in_turn(ours, our_name, theirs, their_name, options.pairs)
            peaks = {precision: max(peak, peaks[precision]) for precision, peak in ours.ask("peak").items()}
            rows.append(print_row(what, *times, ours.gflop, peaks["bf16" if "_bf16" in our_name else "fp32"]))
            rows[-1]["pytorch"] = name
    for server in (ours, theirs):
        if server:
            server.close()
    return rows


def program_of(options):
    return common.program(options, "bench")


def device_flags(options):
    """Of both programs."""
    return [] if options.device == "cpu" else ["--device", options.device]


def our_server(options):
    return Server([program_of(options), "serve", *device_flags(options)])


def contractions(options):
    """The step against its own contractions as bare oneDNN calls, in two processes in turn."""
    a, b = Server([program_of(options), "serve"]), Server([program_of(options), "serve"])
    step, bare = in_turn(a, "step", b, "contractions", options.pairs)
    a.close(), b.close()
    return print_row("step, its bare oneDNN contractions", step, bare)


def main():
    p = common.parser(__doc__)
    p.add_argument("--python", action="append", default=[], metavar="NAME=INTERPRETER", help="a Python that has PyTorch")
    p.add_argument("--pairs", type=int, default=11, help="samples of each (default: 11)")
    p.add_argument("--only", help="our names, as in step,add")
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    p.add_argument("--json", type=Path)
    options = p.parse_args()
    if options.pairs < 9:
        p.error(f"--pairs {options.pairs}: a median takes at least 9")
    if options.device == "cpu":
        where = "one thread on one core"
    else:
        server = our_server(options)
        where = server.header["settings"]["description"]
        server.close()
    print(f"{where}, {common.load()}")
    print(f"{'':<34} {'Tessera':>12} {'other':>12} {'ratio':>8}   95 % interval   rates of Tessera and the other")
    rows = []
    if options.device == "cpu" and (not options.only or "step" in options.only.split(",")):
        rows.append(contractions(options))
    for choice in options.python:
        name, _, interpreter = choice.partition("=")
        if not interpreter:
            p.error(f"--python {choice}: expected NAME=INTERPRETER")
        rows += compare(options, name, interpreter)
    print(f"ratio: time of the other over Tessera's; {common.load()}")
    if options.json:
        options.json.write_text(json.dumps({"load": common.load(), "device": where, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
