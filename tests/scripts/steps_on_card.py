#!/usr/bin/env python3
"""What a step of `train --device cuda` costs beside its arithmetic: calls that allocate, waits of the host, launches.

  steps_on_card.py ON_VIRTUAL_GPU LIBRARIES TRAIN [MODEL ...]

How: a run of two steps and one of five are counted on the virtual GPU (VGPU_COUNTERS); the difference is three steps, the third to
the fifth. They make no call that allocates: what the first two make ahead (memory of the card, pinned slabs, events) holds what later
steps need, also those that the host enqueues while others run. Prints a line for each model and fails where a number is above its
bound.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SHORT, LONG = 2, 5  # steps
ALLOCATING = ("cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuModuleLoadData",
              "cuMemHostAlloc", "cuMemFreeHost", "cuStreamCreateWithPriority", "cuEventCreate")  # fmt: skip
WAITING = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "wait for a copy to pageable memory")

GPT = ["--set", "layers=2", "--set", "dim=32", "--set", "dropout=0.1", "--seq-len", "16"]
# Arguments; the most launches of kernels in a step (forward, backward, clipping, update), as eager ops and compiled; the most waits.
# Bounds are what was measured: the launches are the same in every run, so one more is a change that somebody has to want. Waits: one
# for the loss and one for the norm, which the program reads.
MODELS = {
    "mlp": ([], 52, 38, 2),
    "gpt-nano": (GPT, 161, 128, 2),
    "resnet18": (["--image-size", "32", "--set", "width=8"], 724, 475, 2),
    "bert-mini": (GPT, 267, 219, 2),
}


def counted(command, model, steps, work, compiled):
    file = Path(work) / "counters"
    done = subprocess.run(
        [*command, "--device", "cuda", "--model", model, "--batch-size", "4", "--steps", str(steps), *MODELS[model][0],
         *(["--compile"] if compiled else [])],
        env={**os.environ, "VGPU_COUNTERS": str(file)}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{model}: status {done.returncode}\n{done.stdout}{done.stderr}")
    calls, ops = Counter(), Counter()
    for line in file.read_text(encoding="utf-8").splitlines():
        kind, name, count, *_ = line.split("\t")
        (calls if kind == "call" else ops)[name] = int(count)
    file.unlink()
    return calls, ops


def within_bounds(command, model, compiled):
    _, *most_launches, most_waits = MODELS[model]
    most_launches = most_launches[compiled]
    with tempfile.TemporaryDirectory() as work:
        (short, short_ops), (long, long_ops) = (counted(command, model, n, work, compiled) for n in (SHORT, LONG))
    steps, differ = LONG - SHORT, long - short

    def of(names):
        return {name: differ[name] / steps for name in names if differ[name]}

    allocations, waits, launches = of(ALLOCATING), of(WAITING), differ["cuLaunchKernel"] / steps
    kernels = ", ".join(f"{n / steps:g} {name}" for name, n in (long_ops - short_ops).most_common(6))
    print(f"{model}{' compiled' if compiled else ''}, steps {SHORT + 1} to {LONG}: per step {launches:g} launches (at most "
          f"{most_launches}), {sum(waits.values()):g} waits of the host (at most {most_waits}) {waits}, "
          f"{sum(allocations.values()):g} calls that allocate {allocations}; most of: {kernels}", flush=True)  # fmt: skip
    return not allocations and launches <= most_launches and sum(waits.values()) <= most_waits


def main():
    run, libraries, train, *models = sys.argv[1:]
    command = [run, "--libraries", libraries, train]
    failed = False
    for model in models or MODELS:
        for compiled in (False, True):
            failed |= not within_bounds(command, model, compiled)
    sys.exit(failed)


main()
