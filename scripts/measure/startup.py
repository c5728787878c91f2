#!/usr/bin/env python3
"""Start-up: `tlaunch --nproc 2 train` from command to the end of the first training step, under 0.5 s.

How: the time from starting the launcher until the first line of --metrics is there (looked for every half millisecond);
the median of several runs, after one that warms the page cache.

Usage: startup.py [TEXT] [--build DIR] [--nproc 2] [--runs 11]
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

LIMIT = 0.5
DEADLINE = 60


def seconds_to_first_step(options, data):
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [common.program(options, "tlaunch"), "--nproc", options.nproc, common.program(options, "train")]
        command += ["--model", "gpt-nano", "--data", data, "--batch-size", "12", "--steps", "1", "--metrics", str(metrics)]
        begin = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while not (metrics.exists() and metrics.stat().st_size):
            if run.poll() not in (None, 0) or time.perf_counter() - begin > DEADLINE:
                run.kill()
                sys.exit(f"{' '.join(command)}\nfailed:\n{run.stdout.read().decode()}")
            time.sleep(0.0005)
        first = time.perf_counter() - begin
        run.communicate()
        return first, time.perf_counter() - begin


def main():
    p = common.parser(__doc__)
    common.add_text_argument(p)
    p.add_argument("--nproc", default="2")
    p.add_argument("--runs", type=int, default=11)
    options = p.parse_args()
    kinds = {"synthetic data": "synthetic:"}
    if options.text and options.text.is_file():
        kinds[f"text, {options.text.stat().st_size / 1e6:.1f} MB"] = f"text:{options.text}"
    print(f"{options.nproc} ranks, {common.load()}")
    good = True
    for name, data in kinds.items():
        seconds_to_first_step(options, data)
        times = [seconds_to_first_step(options, data) for _ in range(options.runs)]
        first = statistics.median(t[0] for t in times)
        good &= first < LIMIT
        print(
            f"{name:<16} first step after {first:.3f} s (limit {LIMIT} s, fastest {min(t[0] for t in times):.3f} s),"
            f" end of the program after {statistics.median(t[1] for t in times):.3f} s  {'ok' if first < LIMIT else 'MISSED'}"
        )
    sys.exit(not good)


if __name__ == "__main__":
    main()
