"""What the measuring scripts share: where the programs and the data are, runs with their metrics, statistics.

Invariant: every script prints what it ran on and how busy the machine was, and ends with a non-zero status when what it
shows does not hold.
"""

import argparse
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def parser(description):
    p = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    p.add_argument("--build", type=Path, default=ROOT / "build", help="build folder (default: build)")
    return p


# Student's quantiles for a two-sided interval of 95 %, by degrees of freedom from 1 on
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
STUDENT += [2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]


def mean_ratio_interval(ratios):
    """Geometric mean of independent ratios, at least two, with its 95 % interval by Student's distribution."""
    logs = [math.log(r) for r in ratios]
    mean, freedom = statistics.mean(logs), len(logs) - 1
    half = STUDENT[min(freedom, len(STUDENT)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def add_text_argument(p):
    folder = os.environ.get("TESSERA_TEST_DATA", "")
    p.add_argument(
        "text",
        nargs="?",
        type=Path,
        default=Path(folder) / "tinyshakespeare.txt" if folder else None,
        help="text file (default: tinyshakespeare.txt in $TESSERA_TEST_DATA)",
    )


def check_text(options):
    if options.text is None or not options.text.is_file():
        sys.exit(f"{Path(sys.argv[0]).name}: no text file {options.text}; give one, or set TESSERA_TEST_DATA")


def program(options, name):
    path = options.build / "bin" / name
    if not path.is_file():
        sys.exit(f"{Path(sys.argv[0]).name}: there is no {path}; build first, or give --build")
    return str(path)


def digest(path):
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class Kept:
    """The finished parts of a long measurement, in a file of JSON lines: one that says what is measured, then one for each part.

    `of`: what must be the same for parts to be comparable, as the digests of the programs and the options."""

    def __init__(self, path, of):
        self.path = path
        lines = path.read_text().splitlines() if path.is_file() else []
        if lines and json.loads(lines[0]) != of:
            sys.exit(f"{Path(sys.argv[0]).name}: {path} is of other programs or options; remove it, or give another --results")
        self.parts = [json.loads(line) for line in lines[1:]]
        if not lines:
            path.write_text(json.dumps(of) + "\n")

    def add(self, part):
        with self.path.open("a") as file:
            file.write(json.dumps(part) + "\n")


def load():
    return f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores"


def train(options, ranks, *flags, cards=False):
    """Runs `tlaunch --nproc ranks train flags`, on as many virtual cards if asked; returns (lines of the steps, the last line)."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [program(options, "tlaunch"), "--nproc", str(ranks), program(options, "train")]
        command += [*map(str, flags), "--metrics", str(metrics)]
        if cards:
            vgpu = [ROOT / "scripts/on-virtual-gpu", "--libraries", options.build / "vgpu", "--devices", ranks]
            command = [*map(str, vgpu), *command, "--device", "cuda"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "loss" in line], lines[-1]


def ratio_interval(over, under, resamples=2000):
    """Median(over) / median(under) of samples taken in turn, with its 95 % bootstrap interval over pairs."""
    draw = random.Random(0)
    pairs = list(zip(over, under))

    def ratio(sample):
        return statistics.median(p[0] for p in sample) / statistics.median(p[1] for p in sample)

    ratios = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(resamples))
    return ratio(pairs), ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples)]
