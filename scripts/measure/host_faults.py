#!/usr/bin/env python3
"""Kills ranks and agents of a job of several hosts at random moments, those that lead among them, starts killed agents again,
and checks that the job ends as if nothing had happened: exit status 0 on all hosts, the parameters of an undisturbed run of one
rank, no process left on any host. Hosts are made of namespaces (tests/hosts), which takes root.

  scripts/measure/host_faults.py [--kills 12] [--hosts 4] [--each 1] [--strategy ddp] [--compile] [--seed 1] [--json FILE]

Prints a line for each kill, with the seconds until the next step after it (of an agent: after it was started again, 0.2 s after
the kill). Exits 1 where something went wrong.
"""
import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "hosts"))
from hosts import Hosts  # noqa: E402

PORT = 29513
MODEL = ["--model=gpt-nano", "--set=layers=1", "--set=dim=32", "--set=heads=2", "--seq-len=16", "--batch-size=8", "--deterministic", "--logical-batches=8"]
PATIENCE = 60.0  # seconds within which a step has to follow a kill


class Output(threading.Thread):
    """Reads what an agent prints, and knows when it told of steps and of restarts."""

    def __init__(self, process):
        super().__init__(daemon=True)
        self.process, self.lines, self.steps, self.restarts = process, [], [], []
        self.start()

    def run(self):
        for line in self.process.stdout:
            self.lines.append(line)
            if '"step":' in line:
                self.steps.append(time.monotonic())
            if "tlaunch: restarting all ranks" in line or "; restarting all ranks" in line:
                self.restarts.append(time.monotonic())


class Job:
    def __init__(self, args, hosts, folder):
        self.args, self.hosts, self.folder, self.outputs, self.texts = args, hosts, folder, {}, []

    def start(self, k):
        train = [
            f"{self.args.build}/bin/train", *MODEL, f"--steps={self.args.steps}", f"--strategy={self.args.strategy}",
            f"--checkpoint={self.folder}/saved", "--save-every=5", "--keep=3", "--resume", "--metrics=/dev/fd/1",
            *(["--compile"] if self.args.compile else []),
        ]
        process = self.hosts[k].start(
            f"{self.args.build}/bin/tlaunch", f"--nnodes={self.args.hosts}", f"--node-rank={k}", f"--rdzv-endpoint=node0:{PORT}",
            f"--nproc={self.args.each}", "--max-restarts=100000", "--join-timeout=60", "--node-timeout=2", "--grace=1", "--timeout=10", *train,
            env={**os.environ, "TESSERA_JOB_KEY": "a secret of this run alone", "OMP_NUM_THREADS": "1"},
        )
        if k in self.outputs:
            self.texts += self.outputs[k].lines
        self.outputs[k] = Output(process)

    def step_after(self, moment, kill=None):
        """Waits for a step after `moment`, and after the restart that followed `kill`; how long it took, or None."""
        while time.monotonic() < moment + PATIENCE:
            outputs = list(self.outputs.values())
            again = [t for o in outputs for t in o.restarts if kill is not None and t > kill]
            told = [t for o in outputs for t in o.steps if t > max([moment, *again[-1:]])]
            if told and (again or kill is None):
                return min(told) - moment
            if any(o.process.poll() is not None for o in self.outputs.values()):
                return None
            time.sleep(0.01)
        return None


def pids(host, pattern):
    return host.run("pgrep", "-f", pattern).stdout.split()


def undisturbed(args, folder):
    command = [f"{args.build}/bin/train", *MODEL, f"--steps={args.steps}", f"--checkpoint={folder}/alone", "--save-every=1000000"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout
    return re.search(r"parameters ([0-9a-f]{32})", out).group(1)


def run(args, folder):
    dice, wrong, waits = random.Random(args.seed), [], []
    expected = undisturbed(args, folder)
    with Hosts(args.hosts) as hosts:
        job = Job(args, hosts, folder)
        for k in range(args.hosts):
            job.start(k)
        if job.step_after(time.monotonic()) is None:
            sys.exit("the job took no step:\n" + "".join(line for o in job.outputs.values() for line in o.lines[-20:]))
        for n in range(args.kills):
            time.sleep(dice.uniform(0, 1.5))
            kind, k = dice.choice(["rank", "agent", "agent"]), dice.randrange(args.hosts)
            found = pids(hosts[k], "^[^ ]*bin/train" if kind == "rank" else "bin/tlaunch --nnodes")
            if not found:
                continue  # it is just being started again
            moment = killed = time.monotonic()
            hosts[k].run("kill", f"-{int(signal.SIGKILL)}", found[0])
            if kind == "agent":
                job.outputs[k].process.wait(timeout=10)
                time.sleep(0.2)
                moment = time.monotonic()
                job.start(k)
            took = job.step_after(moment, killed)
            waits.append(took)
            print(f"kill {n}: {kind} on node{k}: " + (f"the next step after {took:.2f} s" if took is not None else "NO STEP"), flush=True)
            if took is None:
                wrong.append(f"kill {n}: no step followed")
                break
        try:
            for k, output in job.outputs.items():
                code = output.process.wait(timeout=300)
                output.join(timeout=10)
                if code != 0:
                    wrong.append(f"node{k}: exit status {code}")
        except subprocess.TimeoutExpired:
            wrong.append("the job did not end")
        text = "".join(job.texts + [line for o in job.outputs.values() for line in o.lines])
        hashes = set(re.findall(r"parameters ([0-9a-f]{32})", text))
        if hashes != {expected}:
            wrong.append(f"parameters {hashes}, undisturbed {expected}")
        for k in range(args.hosts):
            if left := pids(hosts[k], "bin/(train|tlaunch)"):
                wrong.append(f"node{k}: processes {left} are left")
        if wrong:
            for k, output in job.outputs.items():
                print(f"---- node{k}\n" + "".join(output.lines[-40:]))
    return wrong, [w for w in waits if w is not None]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong, waits = run(args, folder)
    waits.sort()
    if waits:
        print(f"{len(waits)} kills: the next step after {waits[len(waits) // 2]:.2f} s (median), {waits[-1]:.2f} s (longest)")
    for text in wrong:
        print(f"WRONG: {text}")
    if args.json:
        args.json.write_text(json.dumps({"kills": len(waits), "waits_s": [round(w, 3) for w in waits], "wrong": wrong}) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
