#!/usr/bin/env python3
"""Checkpoints: what an asynchronous save costs the training thread and 50 steps around it; save and load beside PyTorch's.

How: `bench checkpoint` beside torch.save + fsync and torch.load of as many bytes in the same folder, in turn (PyTorch before
2.0 has no torch.distributed.checkpoint; a later one is measured too). For the slowdown, runs of 59 training steps with one
save after step 30 and runs without, in turn; the ratio of their times with its 95 % interval, limit 1.02.

Usage: checkpoint.py [--build DIR] [--folder .] [--megabytes 256] [--rounds 5] [--python INTERPRETER]
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common

LIMIT = 1.02
STEPS, SAVE_AT = 59, 30
# 3.2 M parameters: 38 MB with the moments of AdamW; small batches, so there is little work for each byte saved.
MODEL = "--model gpt-nano --set layers=4 --set heads=4 --set dim=256 --seq-len 64 --batch-size 8"

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


def speeds(options):
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = Path(folder) / "bench.json"
        size = ["--megabytes", str(options.megabytes), "--rounds", str(options.rounds)]
        command = [common.program(options, "bench"), "checkpoint", "--folder", folder, *size, "--json", str(result)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        ours = json.loads(result.read_text())["result"]
        command = [options.python, "-c", TORCH, folder, str(options.megabytes), str(options.rounds)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"no PyTorch figures: {done.stderr.strip().splitlines()[-1]}")
            return
    torch = json.loads(done.stdout)
    print(f"PyTorch {torch['version']}, {torch['threads']} threads, medians of {options.rounds}")
    size = ours["bytes"]
    for key in ("save", "load_cold", "load_warm", "dcp_save", "dcp_load_cold", "dcp_load_warm"):
        if key in torch:
            t, own = statistics.median(torch[key]), ours[key.replace("dcp_", "")]["median"]
            print(f"  {key:<14} {t * 1e3:9.2f} ms  {size / t / 1e9:6.2f} GB/s; ours takes {own / t:.2f} of that")


def seconds(options, *flags):
    _, last = common.train(options, 1, *MODEL.split(), "--data", "synthetic:", "--steps", STEPS, *flags)
    return last["seconds"]


def slowdown(options):
    with_save, without = [], []
    for i in range(options.rounds + 1):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            # One save after step 30; the one after the last step begins when the clock has stopped.
            a = seconds(options, "--checkpoint", f"{folder}/c", "--save-every", SAVE_AT)
            b = seconds(options)
        if i:
            with_save.append(a), without.append(b)
    ratio, low, high = common.ratio_interval(with_save, without)
    verdict = "ok" if high <= LIMIT else "MISSED" if low > LIMIT else "UNDECIDED: measure on a quieter machine"
    print(
        f"{STEPS} steps with one save: {statistics.median(with_save):.3f} s, without {statistics.median(without):.3f} s,"
        f" ratio {ratio:.4f} [{low:.4f}, {high:.4f}] (limit {LIMIT})  {verdict}"
    )
    return verdict == "ok"


def main():
    p = common.parser(__doc__)
    p.add_argument("--folder", default=".")
    p.add_argument("--megabytes", type=int, default=256)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--python", default="/usr/bin/python3", help="interpreter with PyTorch")
    options = p.parse_args()
    print(common.load())
    speeds(options)
    good = slowdown(options)
    print(common.load())
    sys.exit(not good)


if __name__ == "__main__":
    main()
