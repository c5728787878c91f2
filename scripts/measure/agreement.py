#!/usr/bin/env python3
"""What it costs that ranks agree: comparisons and hashes of GPT-2 124M take at most 0.1 % of 100 steps with one save.

How: two ranks train for a few steps and save at the end. `train` says how long it compared options, data, weights and
replicas, waiting for the others left out; a step is the median of --metrics. Weights and the state of the optimizer are
hashed before the first step, for the save and at the end, however many steps lie between, so the cost is set against 100 of these steps.

Usage: agreement.py [TEXT] [--build DIR] [--steps 4] [--json FILE]
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common

LIMIT = 0.1  # percent
STORY = re.compile(r"ranks agreed on .* \(([\d.]+) MB each, compared (\d+) times?\) in ([\d.]+) ms")


def main():
    p = common.parser(__doc__)
    common.add_text_argument(p)
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--json", type=Path, metavar="FILE")
    options = p.parse_args()
    common.check_text(options)
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [common.program(options, "tlaunch"), "--nproc", "2", common.program(options, "train"), "--model", "gpt2"]
        command += ["--data", f"text:{options.text}", "--seq-len", "512", "--batch-size", "2", "--compile"]
        command += ["--steps", str(options.steps), "--checkpoint", f"{folder}/saves", "--metrics", str(metrics)]
        done = subprocess.run(command, capture_output=True, text=True)
        story = STORY.search(done.stdout + done.stderr)
        if done.returncode != 0 or not story:
            sys.exit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        steps = [line["step_ms"] for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    step, cost = statistics.median(steps), float(story[3])
    percent = cost / step  # of one step, in percent of a hundred
    print(f"GPT-2 124M on 2 ranks, {common.load()}: {story[1]} MB compared {story[2]} times in {cost:.2f} ms, which is "
          f"{percent:.3f} % of 100 steps of {step:.0f} ms; the limit is {LIMIT} %")  # fmt: skip
    if options.json:
        result = {"what": f"GPT-2 124M, 2 ranks, steps of {step:.0f} ms", "bytes": float(story[1]) * 1e6, "times": int(story[2])}
        options.json.write_text(json.dumps(result | {"ms": cost, "percent_of_100_steps": percent}) + "\n")
    sys.exit(percent > LIMIT)


if __name__ == "__main__":
    main()
