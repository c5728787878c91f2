#!/usr/bin/env python3
"""Kills and stops random ranks of training runs at random moments, under every strategy, half of them with saves, and
checks what users rely on: the right rank is named by tlaunch and by every survivor, the exit status is the documented
one, a killed rank is known within a second and no survivor of a stopped one waits longer than the deadline and two
seconds, and nothing of the job is left. A mismatch is a rank that makes another call in place of a random one. With --cards ranks
train on virtual cards; a hang is then one of a card, in a random call, which nobody can tell the rank of.

  scripts/measure/faults.py [--kills 30] [--stops 15] [--mismatches 0] [--cards [--hangs 0]] [--strategies ddp,fsdp,...]
                            [--results FILE.jsonl] [--seed 1]

Prints a line for each strategy and what went wrong where; exits 1 where something did. With --results, rounds that the
file holds already are not run again, so that an interrupted run goes on where it was.
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
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STRATEGIES = {
    "ddp": (4, "dp=4", []),
    "fsdp": (4, "dp=4", []),
    "hsdp": (4, "replicate=2,shard=2", []),
    "tp": (4, "tp=4", []),
    "fsdp+tp": (4, "dp=2,tp=2", []),
    "hsdp+tp": (8, "replicate=2,shard=2,tp=2", []),
    "pp": (4, "dp=2,pp=2", ["--accumulate", "2"]),
}
MODEL = ["--set", "layers=2", "--set", "dim=32", "--set", "heads=4", "--seq-len", "16", "--batch-size", "16"]
GRACE = 2.0  # seconds beyond the deadline within which all survivors of a stopped rank have ended
START = 20.0  # seconds within which a job has come to the call that a fault is in
KNOWN = 1.0  # seconds within which those of a killed one have: its connections and its process are gone at once


def processes_with(mark, launcher):
    """Live processes whose environment holds `mark`: their ranks by pid, -1 for those that ranks have started."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as f:
                variables = f.read().split(b"\0")
            with open(f"/proc/{name}/stat") as f:
                state, parent = f.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if mark.encode() in variables and state not in "ZX":
            rank = [v[5:] for v in variables if v.startswith(b"RANK=")]
            found[int(name)] = int(rank[0]) if rank and int(parent) == launcher else -1
    return found


def ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def run_round(args, strategy, kind, index, folder):
    """One job, and what was wrong with its end: a list of texts."""
    size, mesh, more = STRATEGIES[strategy]
    dice = random.Random(f"{args.seed} {strategy} {kind} {index}")
    victim, moment, saves = dice.randrange(size), dice.uniform(0.05, 3.0), index % 2 == 1
    mark = f"FAULTS_MARK={os.getpid()}.{time.monotonic_ns()}"
    bin_folder = os.path.join(args.build, "bin")
    on_cards = [f"{ROOT}/scripts/on-virtual-gpu", "--libraries", f"{args.build}/vgpu", "--devices", str(size)]
    command = [*(on_cards if args.cards else []), f"{bin_folder}/tlaunch", "--nproc", str(size), "--timeout", str(args.timeout),
               "--join-timeout", str(args.timeout), f"{bin_folder}/train", "--data", f"text:{folder}/text.txt", "--steps", "1000000",
               "--device", "cuda" if args.cards else "cpu", "--strategy", strategy, "--mesh", mesh, *MODEL, *more]
    if saves:
        command += ["--checkpoint", f"{folder}/{strategy}-{kind}-{index}", "--save-every", str(dice.choice([1, 5, 20])),
                    "--keep", "2"]
    call = dice.randrange(1, 100)  # of a fault that is in a call
    in_call = {"mismatch": {"TESSERA_FAULT": f"rank={victim},n={call},mismatch"}, "hang": {"VGPU_NCCL": f"hang:0:{call}"}}.get(kind, {})
    log_path = f"{folder}/log"
    with open(log_path, "wb") as log:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                               env={**os.environ, **in_call, "FAULTS_MARK": mark.split("=")[1]})
        start = time.monotonic()
        ranks = {}
        while len(ranks) < size and time.monotonic() < start + 20:
            ranks = {rank: pid for pid, rank in processes_with(mark, job.pid).items() if rank >= 0}
        wrong = []
        if in_call:
            moment = 0
        else:
            time.sleep(max(0, start + moment - time.monotonic()))
            try:
                os.kill(ranks[victim], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            except (KeyError, ProcessLookupError):
                wrong.append("the run ended before the fault")
        hit = time.monotonic()
        ends = {}
        while job.poll() is None and time.monotonic() < hit + args.timeout + 30:
            for rank, pid in ranks.items():
                if rank != victim and rank not in ends and ended(pid):
                    ends[rank] = time.monotonic() - hit
            time.sleep(0.02)
        if job.poll() is None:
            wrong.append("tlaunch did not end")
            os.kill(job.pid, signal.SIGKILL)
            job.wait()
        took = time.monotonic() - hit
    time.sleep(0.1)
    with open(log_path, errors="replace") as f:
        text = f.read()
    limit = args.slack + (KNOWN if kind == "kill" else args.timeout + GRACE + (START if in_call else 0))
    late = {r: round(ends.get(r, took), 2) for r in range(size) if r != victim and ends.get(r, took) > limit}
    if late:
        wrong.append(f"survivors ended after {late} s")
    named = {"kill": f"tlaunch: rank {victim} failed first: signal 9", "stop": f"tlaunch: rank {victim} held up the others"}.get(kind, "")
    first = re.search(r"^tlaunch: rank .*$", text, re.M)
    if not first or not first.group().startswith(named):
        wrong.append(f"tlaunch says: {first.group() if first else 'nothing'}")
    status = 128 + 9 if kind == "kill" else 1
    if job.returncode != status:
        wrong.append(f"exit status {job.returncode}, not {status}")
    for rank in range(size):
        # Reports of calls have numbers; what a group does to begin or to allocate memory has none.
        report = "#|(allocate|init) on|init_process_group|store|checkpoint"
        lines = [line for line in text.splitlines() if line.startswith(f"[rank{rank}] ") and re.search(report, line)]
        names = {"mismatch": rf"ranks made different calls|\brank {victim}\b", "hang": "not all of its data has come|they wait for each other"}
        if rank != victim and not any(re.search(names.get(kind, rf"\brank {victim}\b"), line) for line in lines):
            wrong.append(f"rank {rank} does not name it: {lines[-1][:300] if lines else 'nothing'}")
    for pid, rank in processes_with(mark, job.pid).items():
        wrong.append(f"process {pid} (rank {rank}) is left")
        os.kill(pid, signal.SIGKILL)
    return {"strategy": strategy, "kind": kind, "index": index, "victim": victim, "saves": saves,
            "moment_s": round(moment, 3), "survivors_s": round(max(ends.values(), default=took), 2),
            "tlaunch_s": round(took, 2), "wrong": wrong, "log": text[-4000:] if wrong else ""}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stops", type=int, default=15)
    parser.add_argument("--mismatches", type=int, default=0)
    parser.add_argument("--hangs", type=int, default=0)
    parser.add_argument("--cards", action="store_true", help="ranks train on virtual cards")
    parser.add_argument("--timeout", type=int, default=4, help="deadline of collectives and of joining, in seconds")
    parser.add_argument("--slack", type=float, default=0, help="seconds more, for a machine that has other work")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--seed", default="1")
    parser.add_argument("--results", help="a file of JSON lines, one for each round")
    parser.add_argument("--show", action="store_true", help="print the output of rounds that went wrong")
    args = parser.parse_args()
    done = {}
    if args.results and os.path.exists(args.results):
        with open(args.results) as f:
            for line in f:
                r = json.loads(line)
                done[r["strategy"], r["kind"], r["index"]] = r
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/text.txt", "w") as f:
            f.writelines(f"{i} of a text\n" for i in range(30000))
        for strategy in args.strategies.split(","):
            for kind, count in (("kill", args.kills), ("stop", args.stops), ("mismatch", args.mismatches), ("hang", args.hangs)):
                rounds = []
                for index in range(count):
                    if (strategy, kind, index) not in done:
                        result = run_round(args, strategy, kind, index, folder)
                        done[strategy, kind, index] = result
                        if args.results:
                            with open(args.results, "a") as f:
                                f.write(json.dumps(result) + "\n")
                    rounds.append(done[strategy, kind, index])
                bad = [r for r in rounds if r["wrong"]]
                failures += len(bad)
                if rounds:
                    print(f"{strategy:8s} {kind}: {len(rounds) - len(bad)} of {len(rounds)} right; the last survivor "
                          f"ended after {max(r['survivors_s'] for r in rounds):.2f} s at most", flush=True)
                for r in bad:
                    print(f"  {kind} {r['index']}: rank {r['victim']} after {r['moment_s']} s"
                          f"{' with saves' if r['saves'] else ''}: {'; '.join(r['wrong'])}", flush=True)
                    if args.show:
                        print(re.sub("^", "    | ", r["log"], flags=re.M))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
