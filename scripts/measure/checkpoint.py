#!/usr/bin/env python3
"""Checkpoints: what an asynchronous save costs the training thread and 50 steps around it; save and load beside PyTorch's.

How: for each size `bench checkpoint` beside torch.save + fsync and torch.load of as many bytes in the same folder (PyTorch
before 2.0 has no torch.distributed.checkpoint; a later one is measured too). What holds up the training thread, in save() and
in writes that wait for the copy, is compared with the bytes over 20 GB/s: in the training of models whose parameters and
moments are 67 and 268 MB, with small batches. That all is overwritten at once, before a step computes anything, is shown beside
it. For the slowdown, blocks of 50 training steps that begin with a save and blocks without, in turn in one process: the median
of the ratios of their times with its 95 % interval, limit 1.02. One thread on one core is the hardest: `taskset -c 3 env
OMP_NUM_THREADS=1 checkpoint.py`. The limits hold on a machine that does nothing else: copies share the memory's bandwidth with
whatever else runs.

Usage: checkpoint.py [--build DIR] [--folder .] [--megabytes 64 256] [--rounds 9] [--pairs 40] [--python INTERPRETER]
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common

SLOWDOWN = 1.02
BYTES_PER_SECOND = 20e9
# Small batches, so there is little work for each byte saved. 3.2 M parameters: 38 MB with the moments of AdamW.
BATCH = "--model gpt-nano --set heads=4 --seq-len 64 --batch-size 8"
MODEL = f"{BATCH} --set layers=4 --set dim=256"
# Those of 67 and 268 MB: a save, then a few steps.
HELD_UP = [f"{BATCH} --set layers=7 --set dim={dim} --steps {steps}" for dim, steps in ((256, 10), (512, 3))]

TORCH = """
import json, os, sys, time, torch
folder, megabytes, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
state = {f"w{i:03}": torch.ones(megabytes * 4, 1024) for i in range(64)}  # 64 x 16 KiB for each MiB
path = os.path.join(folder, "torch.pt")
out = {"save": [], "load_cold": [], "load_warm": []}
def forget(p):
    fd = os.open(p, os.O_RDONLY); os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED); os.close(fd)
def timed(key, f):
    start = time.perf_counter(); f(); out.setdefault(key, []).append(time.perf_counter() - start)
def save():
    with open(path, "wb") as f:
        torch.save(state, f); f.flush(); os.fsync(f.fileno())
def load():
    for name, t in torch.load(path).items(): state[name].copy_(t)
for _ in range(rounds):
    timed("save", save); forget(path); timed("load_cold", load); timed("load_warm", load)
os.remove(path)
try:
    import torch.distributed.checkpoint as dcp, shutil
except ImportError:
    dcp = None
if dcp and hasattr(dcp, "save"):
    path = os.path.join(folder, "torch-dcp")
    for _ in range(rounds):
        shutil.rmtree(path, ignore_errors=True)
        timed("dcp_save", lambda: dcp.save(state, checkpoint_id=path))
        for name in os.listdir(path): forget(os.path.join(path, name))
        timed("dcp_load_cold", lambda: dcp.load(state, checkpoint_id=path))
        timed("dcp_load_warm", lambda: dcp.load(state, checkpoint_id=path))
    shutil.rmtree(path)
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), **out}))
"""


def verdict(low, high, limit):
    return "ok" if high <= limit else "MISSED" if low > limit else "UNDECIDED: measure on a quieter machine"


def bench(options, folder, *flags):
    result = Path(folder) / "bench.json"
    command = [common.program(options, "bench"), "checkpoint", "--folder", folder, *map(str, flags)]
    command += ["--json", str(result)]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="", flush=True)
    return json.loads(result.read_text())["result"]


def speeds(options, megabytes):
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ours = bench(options, folder, "--megabytes", megabytes, "--rounds", options.rounds)
        command = [options.python, "-c", TORCH, folder, str(megabytes), str(options.rounds)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"no PyTorch figures: {done.stderr.strip().splitlines()[-1]}")
        return
    torch = json.loads(done.stdout)
    print(f"PyTorch {torch['version']}, {torch['threads']} threads, medians of {options.rounds}")
    for key in ("save", "load_cold", "load_warm", "dcp_save", "dcp_load_cold", "dcp_load_warm"):
        if key in torch:
            t, own = statistics.median(torch[key]), ours[key.replace("dcp_", "")]["median"]
            print(f"  {key:<14} {t * 1e3:9.2f} ms  {ours['bytes'] / t / 1e9:6.2f} GB/s; ours takes {own / t:.2f} of that")


def held_up(options, model):
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ours = bench(options, folder, "--rounds", 0, "--pairs", options.rounds, *model.split())["around"]
    low, high = ours["blocked"]["low"], ours["blocked"]["high"]
    limit = ours["bytes"] / BYTES_PER_SECOND
    found = verdict(low, high, limit)
    print(f"held up [{low * 1e3:.2f}, {high * 1e3:.2f}] ms, limit {limit * 1e3:.2f} ms  {found}")
    return found == "ok"


def slowdown(options):
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ours = bench(options, folder, "--rounds", 0, "--pairs", options.pairs, *MODEL.split())["around"]
    low, high = ours["wall_ratio"]["low"], ours["wall_ratio"]["high"]
    found = verdict(low, high, SLOWDOWN)
    print(f"slowdown [{low:.4f}, {high:.4f}], limit {SLOWDOWN}  {found}")
    return found == "ok"


def main():
    p = common.parser(__doc__)
    p.add_argument("--folder", default=".")
    p.add_argument("--megabytes", type=int, nargs="+", default=[64, 256])
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--pairs", type=int, default=40, help="of blocks of steps; 0: speeds alone")
    p.add_argument("--python", default="/usr/bin/python3", help="interpreter with PyTorch")
    options = p.parse_args()
    if options.pairs and min(options.rounds, options.pairs) < 6:
        p.error("--rounds and --pairs: expected at least 6, which the interval of a median takes")
    print(common.load())
    for size in options.megabytes:
        speeds(options, size)
    good = []
    if options.pairs:
        good = [held_up(options, model) for model in HELD_UP] + [slowdown(options)]
    print(common.load())
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
