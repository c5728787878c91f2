#!/usr/bin/env python3
"""examples/bench/RESULTS.md from the JSON files that the measuring commands have written into one folder.

How: a section whose files are not there stays as it is in the file that is rewritten. Nothing is computed here but ratios of
two times, and named is what falls short of an aim. Invariant: every number stands in one of the files, which are written by,
on cores 2 and 3 of a machine that does nothing else:

  compare_pytorch.py --python 1.13=INTERPRETER --python 2.15=INTERPRETER --json FOLDER/compare.json
  peak_memory.py --python 1.13=INTERPRETER --python 2.15=INTERPRETER --json FOLDER/memory.json
  taskset -c 2,3 bench scaling --model resnet50,bert-base,gpt-nano --precision fp32,bf16 --json FOLDER/scaling.json
  the same with --model gpt2,resnet50,bert-base,gpt-nano --json FOLDER/fsdp.json
  taskset -c 2,3 tlaunch --nproc 2 --bind core bench collectives --only all_reduce --json FOLDER/all_reduce_shm.json
  the same with bench collectives --backend gloo --json FOLDER/all_reduce_gloo.json
  scripts/reference/all_reduce_mpi.cpp, whose head says how, > FOLDER/all_reduce_mpi.json
  scripts/reference/all_reduce_pytorch.py --cores 2,3 > FOLDER/all_reduce_pytorch.json
  compiled_steps.py --json FOLDER/compiled.json
  bench kernels --json FOLDER/kernels.json
  bench int8 --model resnet50 --json FOLDER/int8.json
  compare_builds.py --build BEFORE --build AFTER --json FOLDER/builds.json
  agreement.py --json FOLDER/agreement.json
  faults.py --results FOLDER/faults.jsonl
  scripts/stress --repeats 20 --results FOLDER/stress.jsonl
  scripts/soak --folder FOLDER, which writes FOLDER/soak.jsonl
  learning_pytorch.py RECIPE DATA --results RUNS > FOLDER/learning_RECIPE.md, whose table is taken as it is

Usage: results.py FOLDER [--machine TEXT] [--into FILE]
"""

import argparse
import contextlib
import io
import json
import re
import statistics
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "examples/bench/RESULTS.md"
STEPS = {
    "step": "gpt-nano, batch 12",
    "gpt2": "GPT-2 124M, sequence 512",
    "mlp": "perceptron",
    "bert": "BERT-base, sequence 128",
    "bert512": "BERT-base, sequence 512",
    "resnet50": "ResNet-50, 224 x 224, batch 8",
}


BEYOND_CACHES = 1e8  # bytes


def read(folder, pattern):
    files = sorted(folder.glob(pattern))
    if pattern.endswith(".md"):
        return [file.read_text() for file in files]
    if pattern.endswith("l"):  # a value in each line
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [json.loads(file.read_text()) for file in files]


def step_name(row):
    model, _, precision = row.partition("_bf16")
    return f"{STEPS[model]}, {'bf16' if '_bf16' in row else 'fp32'}" if model in STEPS else None


def table(head, rows):
    if not rows:
        return
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def split(what):
    """("bert_bf16", compiled?, "2.15.0", compiled?) of a row of compare_pytorch.py; None for single ops."""
    ours, theirs, version = re.fullmatch(r"(\S+), (\S+) of PyTorch (\S+)", what).groups()
    rows = [name.removesuffix("_compiled") for name in (ours, theirs)]
    if rows[0] != rows[1] or not step_name(rows[0]):
        return None
    return rows[0], ours != rows[0], version.split("+")[0], theirs != rows[1]


def steps(files):
    cells, times, columns = {}, {}, []
    for row in (row for file in files for row in file["rows"] if " of PyTorch " in row["what"]):
        key = split(row["what"])
        if not key:
            continue
        name, compiled, version, theirs_compiled = key
        if theirs_compiled == compiled or not compiled:
            column = version, theirs_compiled, compiled
            if column not in columns:
                columns.append(column)
            low, high = row["interval"]
            cells.setdefault(name, {})[column] = f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]"
        share = f" ({row['tessera_gflops'] / row['peak_gflops']:.0%})" if "peak_gflops" in row else ""
        times.setdefault(name, {})[compiled] = f"{row['tessera_ms']:.3g}{share}" if row["tessera_ms"] < 10 else f"{row['tessera_ms']:.1f}{share}"
    columns.sort()
    kinds = {(False, False): "PyTorch {}", (True, False): "its torch.compile", (True, True): "compiled over that"}
    head = ["step", "ms", "compiled, ms", *(kinds[their, our].format(version) for version, their, our in columns)]
    table(
        head,
        [
            [step_name(name), times[name].get(False, ""), times[name].get(True, ""), *(row.get(c, "") for c in columns)]
            for name, row in sorted(cells.items(), key=lambda item: list(STEPS).index(item[0].partition("_bf16")[0]))
        ],
    )


def ops(files):
    cells, times, versions, slower = {}, {}, [], []
    for row in (row for file in files for row in file["rows"] if " of PyTorch " in row["what"]):
        ours, theirs, version = re.fullmatch(r"(\S+), (\S+) of PyTorch (\S+)", row["what"]).groups()
        if step_name(ours.removesuffix("_compiled")):
            continue
        name, version = ours if theirs == ours else f"{ours}, {theirs}", version.split("+")[0]
        if version not in versions:
            versions.append(version)
        low, high = row["interval"]
        cells.setdefault(name, {})[version] = f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]"
        us = 1e3 * row["tessera_ms"]
        times[name] = f"{us:.3g}" if us < 100 else f"{us:.0f}"
        if high < 1:
            slower.append(f"{name} ({row['ratio']:.2f} of {version})")
    versions.sort()
    table(
        ["", "us", *(f"PyTorch {v}" for v in versions)],
        [[name, times[name], *(row.get(v, "") for v in versions)] for name, row in cells.items()],
    )
    if slower:
        print(f"\nPyTorch is faster in {', '.join(slower)}.")


def jobs_of(files):
    return [job for file in files for job in file["result"]]


def interval(job, key):
    if key not in job:
        return ""
    i = job[key]
    return f"{i['median']:.3f} [{i['low']:.3f}, {i['high']:.3f}]"


def job_name(job):
    return f"{job['model']}, {job['precision']}, {job['nproc']} ranks"


def below(jobs, key, limit):
    if missed := [f"{job['model']} in {job['precision']} ({job[key]['median']:.3f})" for job in jobs if key in job and job[key]["median"] < limit]:
        print(f"\nBelow the {limit} that {key} is to reach: {', '.join(missed)}.")


def scaling(files):
    jobs, keys = jobs_of(files), ("communication", "lockstep", "weak_scaling", "bound")
    table(
        ["ranks", "communication", "in lockstep", "weak scaling", "its bound"],
        [[job_name(job), *(interval(job, key) for key in keys)] for job in jobs],
    )
    below(jobs, "communication", 0.98)


def fsdp(files):
    jobs = [job for job in jobs_of(files) if "fsdp" in job]
    table(["ranks", "fsdp to ddp"], [[job_name(job), interval(job, "fsdp")] for job in jobs])
    below(jobs, "fsdp", 0.9)


def size_name(n):
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"


def all_reduce(files):
    us = {}
    for result in (file["result"] for file in files):
        for row in result["rows"]:
            us.setdefault((result["backend"], row["verb"]), {})[row["bytes"]] = row["us"]["median"]
    if ("shm", "all_reduce bucket") not in us:
        sys.exit("results.py: the folder has all_reduce files, but not all_reduce_shm.json, with which they are compared")
    bucket, private = us["shm", "all_reduce bucket"], us["shm", "all_reduce"]
    others = [backend for backend, verb in us if backend != "shm" and verb == "all_reduce"]
    rows = []
    for size, ours in bucket.items():
        row = [size_name(size), f"{ours:.2f}", f"{private[size]:.2f}"]
        for backend in others:
            theirs = us[backend, "all_reduce"][size]
            row.append(f"{theirs:.2f} ({theirs / ours:.1f} times)")
        rows.append(row)
    table(["us", "shm", "shm, private memory", *others], rows)


def memory(files):
    rows = {}
    for row in (row for file in files for row in file):
        ours, _, theirs = row["what"].partition(", ")
        version = theirs.partition(" of PyTorch ")[2] + (", torch.compile" if "_compiled of" in theirs else "")
        name = ours.removesuffix("_compiled")
        entry = rows.setdefault(name, {})
        entry["compiled" if ours != name else "Tessera"] = f"{row['tessera_mib'][0]:.0f}"
        entry[version] = f"{row['other_mib'][0]:.0f}"
    columns = ["Tessera", "compiled"] + sorted({c for row in rows.values() for c in row} - {"Tessera", "compiled"})
    table(["MiB", *columns], [[step_name(name), *(row.get(c, "") for c in columns)] for name, row in rows.items()])


def faults(files):
    rounds = {}
    for r in (r for file in files for r in file):
        rounds.setdefault(r["strategy"], {}).setdefault(r["kind"], []).append(r)

    def cells(rows):
        right = sum(not r["wrong"] for r in rows)
        return [f"{right} of {len(rows)}", f"{max(r['survivors_s'] for r in rows):.2f} s"]

    table(
        ["", "killed: right", "last survivor at most", "stopped: right", "last survivor at most"],
        [[name, *cells(kinds["kill"]), *cells(kinds["stop"])] for name, kinds in rounds.items() if len(kinds) == 2],
    )


def compiled(files):
    table(
        ["step", "eager over bare", "compiled over bare", "bare, ms", "compiled in, s", "again, s"],
        [
            [
                f"{row['model']}, {row['precision']}",
                f"{row['step_over_contractions']:.3f}",
                f"{row['compiled_over_contractions']:.3f}",
                f"{row['contractions_ms']:.3g}" if row["contractions_ms"] < 10 else f"{row['contractions_ms']:.1f}",
                f"{row['cold_s']:.2f}",
                f"{row['warm_s']:.3f}",
            ]
            for file in files
            for row in file["rows"]
        ],
    )


def kernels(files):
    rows = [row for file in files for row in file["result"]["rows"]]
    ratios = [row["eager_seconds"] / row["seconds"] for row in rows if "eager_seconds" in row]
    table(
        ["kernel", "MB", "GB/s", "of a copy", "of moving as much", "op by op takes"],
        [
            [
                row["what"],
                f"{row['bytes'] * 1e-6:.3g}",
                f"{row['bytes'] / row['seconds'] * 1e-9:.1f}",
                f"{row['copy_seconds'] / row['seconds']:.2f}",
                f"{row['moving_seconds'] / row['seconds']:.2f}",
                f"{row['eager_seconds'] / row['seconds']:.2f} times" if "eager_seconds" in row else "",
            ]
            for row in rows
        ],
    )
    print(f"\nGeometric mean of the last column: {statistics.geometric_mean(ratios):.2f}.")
    falls_short(
        "Large kernels are to reach 0.85 of the speed at which as much is moved; these do not",
        [(row["what"], row["moving_seconds"] / row["seconds"]) for row in rows if row["bytes"] > BEYOND_CACHES],
        0.85,
    )
    falls_short(
        "Op by op is to take twice as long as a fused kernel; beside these it takes less",
        [(row["what"], row["eager_seconds"] / row["seconds"]) for row in rows if "eager_seconds" in row],
        2,
    )


def falls_short(sentence, values, limit):
    if missed := [f"{name} ({value:.2f})" for name, value in values if value < limit]:
        print(f"\n{sentence}: {', '.join(missed)}.")


def int8(files):
    results = [file["result"] for file in files]
    table(
        ["ms a batch", *results[0]["ms"], "times the faster f32's speed", "the faster bf16's"],
        [
            [
                f"{r['model']}, {r['image_size']} x {r['image_size']}, batch {r['batch_size']}",
                *(f"{ms['median']:.1f}" for ms in r["ms"].values()),
                f"{r['over_fp32']:.2f}",
                f"{r['over_bf16']:.2f}",
            ]
            for r in results
        ],
    )
    falls_short("Bytes are to be twice as fast as f32; these are not", [(r["model"], r["over_fp32"]) for r in results], 2)


def builds(files):
    for file in files:
        rows, percent = file["rows"], lambda ratio: f"{100 * (ratio - 1):+.1f} %"
        apart = [r for r in rows if r["interval"][0] > 1.02 or r["interval"][1] < 0.98]
        mean = statistics.geometric_mean(r["ratio"] for r in rows)
        print(f"{len(rows)} rows over {file['rounds']} rounds, {len(file['slower'])} of them slower by more than 2 %; geometric mean of the "
              f"ratios {mean:.3f}.{' Wholly beyond 2 % in the first measurement were:' if apart else ''}\n")  # fmt: skip
        table(["", "before", "after", "time", "95 % interval", "again"], [
            [r["name"], f"{r['first_ms']:.4g} ms", f"{r['second_ms']:.4g} ms", percent(r["ratio"]),
             " to ".join(map(percent, r["interval"])),
             "slower" if r["name"] in [s["name"] for s in file["slower"]] else "" if r["ratio"] < 1 else "not slower"]
            for r in sorted(apart, key=lambda r: r["ratio"])
        ])  # fmt: skip
        print()


def agreement(files):
    table(
        ["", "compared", "ms", "of 100 steps"],
        [[f["what"], f"{f['bytes'] / 1e6:.1f} MB, {f['times']} times", f"{f['ms']:.2f}", f"{f['percent_of_100_steps']:.3f} %"] for f in files],
    )


def stress(files):
    runs = [r for file in files for r in file]
    names = sorted({r["file"] for r in runs})
    failed = [r for r in runs if r["status"] != 0]
    print(f"{len(names)} files, {min(sum(r['file'] == n for r in runs) for n in names)} runs of each or more: {len(runs) - len(failed)} of "
          f"{len(runs)} runs passed.")  # fmt: skip
    if failed:
        print()
        table(["failed", "run", "tests"], [[r["file"], str(r["repeat"]), ", ".join(r["failed"])] for r in failed])


def soak(files):
    latest = {}
    for r in (r for file in files for r in file):
        latest[r["name"]] = r
    table(
        ["run", "what", "commit", "minutes", "result", "its last line"],
        [
            [r["name"], r["what"], r["commit"], f"{r['minutes']:.0f}", "passed" if r["status"] == 0 else f"status {r['status']}", r["last_line"].replace("|", "/")[:160]]
            for r in latest.values()
        ],
    )


def learning(files):
    print("\n".join(files), end="")


SECTIONS = [
    (
        "compare*.json",
        steps,
        "## A training step on one core\n\nMilliseconds, and in brackets the share of the most that the core did; then how many times as long "
        "PyTorch\ntakes as the step that is not compiled, by version, and its torch.compile as both, with 95 % intervals\n"
        "(`scripts/measure/compare_pytorch.py`).\n",
    ),
    (
        "compare*.json",
        ops,
        "## Single ops on one core\n\nHow many times as long PyTorch takes, by version, with 95 % intervals (`scripts/measure/compare_pytorch.py`);\n"
        "`scripts/reference/bench_ops.py` says what each row is.\n",
    ),
    (
        "compiled*.json",
        compiled,
        "## Compiled steps over their bare products\n\nOne core. Bare: the products and convolutions of the step, each called by itself in the same layouts. Compiled in:\n"
        "with an empty cache; again: with what the cache has then (`scripts/measure/compiled_steps.py`).\n",
    ),
    (
        "kernels*.json",
        kernels,
        "## Fused kernels\n\nGenerated kernels on one core beside a copy of as many bytes, beside a sweep that reads and writes as many, and beside the\n"
        "same computation op by op (`bench kernels`).\n",
    ),
    (
        "int8*.json",
        int8,
        "## Inference on bytes\n\nOne core; bare: the convolutions and the product alone, as prepared library calls (`bench int8`).\n",
    ),
    (
        "scaling*.json",
        scaling,
        "## Several ranks\n\nOne core and one thread a rank. Communication: ranks that know nothing of each other over ddp. In lockstep: the same "
        "ranks over\nthemselves with a barrier after each step, which is all of it but the communication. Weak scaling: one rank over ddp; its\n"
        "bound: one rank over ranks that know nothing of each other (`bench scaling`).\n",
    ),
    (
        "fsdp*.json",
        fsdp,
        "## FSDP beside DDP\n\nHow many steps under fsdp in the time of one under ddp, one core and one thread a rank (`bench scaling`).\n",
    ),
    (
        "all_reduce_*.json",
        all_reduce,
        "## all_reduce between two ranks\n\nOf f32 that is written before each call, each rank on a core of its own: in the group's memory, where gradient buckets lie, and\n"
        "in the program's own; then by other means (`bench collectives`, `scripts/reference/all_reduce_mpi.cpp`,\n`scripts/reference/all_reduce_pytorch.py`).\n",
    ),
    (
        "builds*.json",
        builds,
        "## This build beside an earlier one\n\nThe rows of the first table and of `bench ops`, both builds in turn, linked anew in each round\n"
        "(`scripts/measure/compare_builds.py`).\n",
    ),
    (
        "agreement*.json",
        agreement,
        "## What it costs that ranks agree\n\nOptions, data and weights are compared before the first step, the bits of replicas before the save and at the end\n"
        "(`scripts/measure/agreement.py`).\n",
    ),
    (
        "memory*.json",
        memory,
        "## Peak memory of a process that trains\n\nThe high-water mark of the process (`scripts/measure/peak_memory.py`).\n",
    ),
    (
        "faults*.jsonl",
        faults,
        "## Ranks that are killed or stopped\n\nAt random moments of runs with `--timeout 4`, half of them with saves, 4 ranks (hsdp+tp: 8) on two cores. Right: tlaunch and all\n"
        "survivors name the rank, the exit status is as documented, the survivors have ended within 6 s, and no process is left\n"
        "(`scripts/measure/faults.py`).\n",
    ),
    (
        "stress*.jsonl",
        stress,
        "## Tests that look at time\n\nEach file again and again, beside other tests and busy loops on all cores (`scripts/stress`).\n",
    ),
    (
        "soak*.jsonl",
        soak,
        "## Long runs\n\nWhat takes too long for every change (`scripts/soak`).\n",
    ),
    (
        "learning*.md",
        learning,
        "## Learning beside PyTorch\n\nThe same recipe on both sides, three seeds each (`scripts/measure/learning_pytorch.py`, whose head says the recipes). A ResNet-18: seeds\n"
        "name other draws on each side, so differences are to be judged by the spread over seeds. BERT-mini: per seed both sides begin with the\n"
        "same weights and learn from the same rows with the same targets; dropout is each side's own.\n",
    ),
]


HEAD = """# Results

Written by `scripts/measure/results.py`, which says how to measure again. Figures are of one machine:
ratios, taken in turn, say more than times.
"""


def written(write, text, files):
    """The section; "" where the files have no row of it."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        write(files)
    return f"{text}\n{out.getvalue()}" if out.getvalue() else ""


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("folder", type=Path, metavar="FOLDER", help="with the JSON files")
    p.add_argument("--machine", help="what the sections of FILE were measured on, in words (default: what FILE says)")
    p.add_argument("--into", type=Path, default=RESULTS, metavar="FILE", help="Markdown that is rewritten (examples/bench/RESULTS.md)")
    options = p.parse_args()
    head, *old = re.split(r"^(?=## )", options.into.read_text() if options.into.is_file() else HEAD, flags=re.M)
    old = {section.partition("\n")[0]: section for section in old}
    known = {text.partition("\n")[0] for _, _, text in SECTIONS}
    if unknown := set(old) - known:
        sys.exit(f"results.py: {options.into}: no table is called {sorted(unknown)[0]!r}; remove it, or give another --into")
    sections, renewed = [], 0
    for pattern, write, text in SECTIONS:
        files = read(options.folder, pattern)
        renewed += bool(files)
        sections.append((files and written(write, text, files)) or old.get(text.partition("\n")[0], ""))
    if not renewed:
        sys.exit(f"results.py: {options.folder} has none of {', '.join(pattern for pattern, _, _ in SECTIONS)}")
    if options.machine is not None:
        head = f"{HEAD}\n{options.machine}\n"
    options.into.write_text("\n".join(part.strip() + "\n" for part in [head, *sections] if part))


if __name__ == "__main__":
    main()
