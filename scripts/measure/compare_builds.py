#!/usr/bin/env python3
"""One build against another: the rows of compare_pytorch.py and of `bench ops`, in turn on one core; 1 where one is slower.

How: where code and data lie decides by some percent how long a small op takes, so that one layout says little of a build
(Mytkowicz et al., Producing wrong data without doing anything obviously wrong, 2009). In every round both programs are
linked anew with their code moved by a random distance (--as-linked leaves them as they are) and started afresh, and each row
is timed in pairs whose order alternates; a round counts with the median of its ratios. From the rounds
comes the ratio second build over first with its 95 % interval, Student's on logarithms. Processor time of the thread is
counted, since others may use the machine; --wall counts the clock's. A row whose interval lies wholly beyond --limit is
measured again, and is slower where the second interval, of fresh rounds only, lies there too: among a hundred rows of equal
speed some intervals do by chance. All rows take an hour or more; rounds that --results holds already, of the same programs, are
not taken again, so that an interrupted run goes on where it was.

Usage: compare_builds.py --build FIRST --build SECOND [--quick] [--only step,matmul] [--rounds 7] [--limit 2] [--json FILE]
                         [--results FILE]
       compare_builds.py --build build --build build --second TESSERA_ISA=base --only gelu
"""

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common
from compare_pytorch import ROWS, Server, duration

SERVED = list(dict.fromkeys(row[0] for row in ROWS))
QUICK_SERVED = ["step", "step_compiled", "add", "add_grad", "view", "matmul_256", "matmul_1024"]
QUICK_SERVED += ["conv3x3", "gelu_large", "softmax_large", "layer_norm_large", "attention", "attention_grad"]
QUICK_OPS = "add"  # those with this text
OPS = "ops: "  # before the names of `bench ops`


class Build:
    """A build folder, with what is set in the environment of its programs. What is linked lies in `scratch`."""

    def __init__(self, options, folder, variables, scratch):
        self.bench = common.program(argparse.Namespace(build=folder), "bench")
        self.folder, self.scratch = folder, Path(scratch)
        self.link = None if options.as_linked else self.link_command()
        self.flags = ["--cpu", str(options.cpu)] + ([] if options.wall else ["--cpu-time"])
        self.environment = os.environ | dict(v.split("=", 1) for v in variables)

    def link_command(self):
        found = subprocess.run(["ninja", "-C", str(self.folder), "-t", "commands", "bench"], capture_output=True, text=True)
        command = found.stdout.strip().split("\n")[-1]
        if found.returncode != 0 or " -o bin/bench " not in command:
            sys.exit(f"compare_builds.py: ninja knows no command that links {self.folder}/bin/bench; give --as-linked to "
                     f"compare the programs as they are\n{found.stdout[:200]}{found.stderr}")
        return command

    def lay_out(self):
        """Links the program with its code moved by up to a page: what is in .text.unlikely stands before all other code."""
        if self.link is None:
            return
        gap, self.bench = self.scratch / "gap.o", str(self.scratch / "bench")
        text = f'.section .text.unlikely,"ax",@progbits\n.skip {16 * random.randrange(1, 256)}\n.section .note.GNU-stack\n'
        subprocess.run(["cc", "-c", "-x", "assembler", "-", "-o", str(gap)], input=text, text=True, check=True)
        command = self.link.replace(" -o bin/bench ", f" -o {shlex.quote(self.bench)} {shlex.quote(str(gap))} ")
        subprocess.run(command, shell=True, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)

    def serve(self):
        return Server([self.bench, "serve", *self.flags], self.environment)

    def ops(self, only=None):
        """Nanoseconds by name."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ops.json"
            command = [self.bench, "ops", *self.flags, "--json", str(path)] + (["--only", only] if only else [])
            done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
            if done.returncode != 0:
                sys.exit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}")
            return {op["name"]: op["ns"]["median"] for op in json.loads(path.read_text())["result"]["ops"]}


class Rounds:
    """Milliseconds of both builds, row by row and round by round."""

    def __init__(self, builds, pairs):
        self.builds, self.pairs, self.rows, self.number = builds, pairs, {}, 0

    def add(self, name, times):
        """`times`: pairs of milliseconds."""
        ratio = statistics.median(second / first for first, second in times)
        self.rows.setdefault(name, []).append((ratio, [statistics.median(t) for t in zip(*times)]))

    def in_order(self, act):
        """act(0) and act(1), the second first in every other call."""
        self.number += 1
        results = {i: act(i) for i in ((0, 1) if self.number % 2 else (1, 0))}
        return results[0], results[1]

    def begin(self):
        for build in self.builds:
            build.lay_out()

    def round_of_served(self, names):
        if not names:
            return
        servers = [b.serve() for b in self.builds]
        for name in names:
            if all(name in s.header["names"] for s in servers):
                self.in_order(lambda i: servers[i].sample(name))  # warm-up
                self.add(name, [self.in_order(lambda i: servers[i].sample(name)) for _ in range(self.pairs)])
                for s in servers:
                    s.ask("free")
        for s in servers:
            s.close()

    def round_of_ops(self, wanted, only=None):
        """Whether there were any."""
        first, second = self.in_order(lambda i: self.builds[i].ops(only))
        names = [name for name in first if name in second and wanted(name)]
        for name in names:
            self.add(OPS + name, [(first[name] * 1e-6, second[name] * 1e-6)])
        return bool(names)


def result(name, rounds):
    ratio, low, high = common.mean_ratio_interval([r[0] for r in rounds])
    medians = [statistics.median(r[1][i] for r in rounds) for i in (0, 1)]
    return {"name": name, "first_ms": medians[0], "second_ms": medians[1], "ratio": ratio, "interval": [low, high]}


def print_row(row, limit, mark):
    low, high = row["interval"]
    verdict = mark if low > 1 + limit else "faster" if high < 1 - limit else ""
    times = f"{duration(row['first_ms']):>12} {duration(row['second_ms']):>12}"
    print(f"{row['name']:<44} {times} {row['ratio']:>8.3f}   [{low:.3f}, {high:.3f}]  {verdict}".rstrip(), flush=True)


def again(builds, options, suspects):
    """Fresh rounds for the rows that looked slower; those that still do."""
    print(f"\nmeasured again, {options.rounds} fresh rounds of each", flush=True)
    rounds = Rounds(builds, options.pairs)
    for _ in range(options.rounds):
        rounds.begin()
        rounds.round_of_served([name for name in suspects if not name.startswith(OPS)])
        for name in suspects:
            if name.startswith(OPS):
                rounds.round_of_ops(lambda found, name=name: OPS + found == name, name[len(OPS) :])
    rows = [result(name, samples) for name, samples in rounds.rows.items()]
    for row in rows:
        print_row(row, options.limit / 100, "SLOWER")
    return rows


def kept_rounds(path, builds, options):
    of = {"programs": [common.digest(b.bench) for b in builds], "environments": [options.first, options.second]}
    of |= {key: getattr(options, key) for key in ("only", "quick", "pairs", "wall", "as_linked")}
    return common.Kept(path, of)


def measure(builds, options):
    chosen = options.only.split(",") if options.only else [""]
    named = lambda name: any(name == part[1:] if part.startswith("=") else part in name for part in chosen)
    served = [name for name in (QUICK_SERVED if options.quick else SERVED) if named(name)]
    rounds = Rounds(builds, options.pairs)
    kept = kept_rounds(options.results, builds, options) if options.results else None
    done = kept.parts[: options.rounds] if kept else []
    for row, sample in (item for one in done for item in one.items()):
        rounds.rows.setdefault(row, []).append(sample)
    with_ops = True  # until it is known that none has such a name
    for _ in range(options.rounds - len(done)):
        rounds.begin()
        rounds.round_of_served(served)
        if with_ops:
            with_ops = rounds.round_of_ops(lambda name: named(OPS + name), QUICK_OPS if options.quick else None)
        if kept:
            kept.add({name: samples[-1] for name, samples in rounds.rows.items()})
    if not rounds.rows:
        sys.exit(f"compare_builds.py: --only {options.only}: no row has such a name in both builds")
    return [result(name, samples) for name, samples in rounds.rows.items()]


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    p.add_argument("--build", action="append", type=Path, help="build folder; given twice, the second is judged by the first")
    p.add_argument("--first", action="append", default=[], metavar="NAME=VALUE", help="in the environment of the first build")
    p.add_argument("--second", action="append", default=[], metavar="NAME=VALUE", help="likewise of the second")
    p.add_argument("--only", help="rows whose name has one of these texts, as in step,matmul; =bert is the row bert alone")
    p.add_argument("--quick", action="store_true", help="few rows, 5 rounds unless --rounds is given: minutes")
    p.add_argument("--rounds", type=int, help="of both builds (default: 7)")
    p.add_argument("--pairs", type=int, default=3, help="samples of each build in a round (default: 3)")
    p.add_argument("--limit", type=float, default=2, help="percent by which a row may be slower (default: 2)")
    p.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)), help="core of all programs (default: the last)")
    p.add_argument("--as-linked", action="store_true", help="keep the layout of the programs; for folders without build.ninja")
    p.add_argument("--wall", action="store_true", help="count the clock's time instead of the thread's")
    p.add_argument("--json", type=Path)
    p.add_argument("--results", type=Path, metavar="FILE", help="finished rounds are kept here, and not taken again")
    options = p.parse_args(argv)
    if len(options.build or []) != 2:
        p.error("expected --build twice")
    options.rounds = options.rounds or (5 if options.quick else 7)
    if options.rounds < 3 or options.pairs < 1:
        p.error("--rounds is at least 3, --pairs at least 1")
    for v in options.first + options.second:
        if "=" not in v:
            p.error(f"{v}: expected NAME=VALUE")
    return options


def main():
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        compare(parse(), (first, second))


def compare(options, scratch):
    os.sched_setaffinity(0, {options.cpu})
    folders = options.build
    builds = [Build(options, *of) for of in zip(folders, (options.first, options.second), scratch)]
    names = [" ".join([str(folder), *variables]) for folder, variables in zip(folders, (options.first, options.second))]
    clock = "clock" if options.wall else "thread's CPU"
    layout = "as linked" if options.as_linked else "linked anew in each round"
    print(f"core {options.cpu}, {clock} time, {options.rounds} rounds of {options.pairs} pairs, {layout}, {common.load()}")
    print(f"first: {names[0]}\nsecond: {names[1]}")
    print(f"{'':<44} {'first':>12} {'second':>12} {'ratio':>8}   95 % interval", flush=True)
    rows, slower = measure(builds, options), []
    for row in rows:
        print_row(row, options.limit / 100, "slower?")
    beyond = lambda row: row["interval"][0] > 1 + options.limit / 100
    suspects = [row["name"] for row in rows if beyond(row)]
    if suspects:
        slower = list(filter(beyond, again(builds, options, suspects)))
    print(f"\nratio: time of the second build over the first's; {len(slower)} of {len(rows)} rows are slower by more than "
          f"{options.limit:g} %; {common.load()}")
    if options.json:
        report = {"first": names[0], "second": names[1], "clock": clock, "layout": layout, "rounds": options.rounds, "load": common.load()}
        report |= {"rows": rows, "slower": slower}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
