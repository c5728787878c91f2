#!/usr/bin/env python3
"""What a step of `train --device cuda` costs beside its arithmetic: calls that allocate, waits of the host, launches.

  steps_on_card.py ON_VIRTUAL_GPU LIBRARIES TRAIN [MODEL ...]

How: a run of three steps and one of six are counted on the virtual GPU (VGPU_COUNTERS); the difference is three steps, the fourth
to the sixth. Prints a line for each model and fails where a number is above its bound.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SHORT, LONG = 3, 6
ALLOCATING = ("cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemHostAlloc",
              "cuMemFreeHost", "cuStreamCreateWithPriority", "cuEventCreate", "cuModuleLoadData")  # fmt: skip
WAITING = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "wait for a copy to pageable memory")

GPT = ["--set", "layers=2", "--set", "dim=32", "--set", "dropout=0.1", "--seq-len", "16"]
# Arguments, and per step the most launches of kernels (forward, backward, clipping, update), and the most waits. Bounds are
# what was measured: the launches are the same in every run, so one more is a change that somebody has to want. Waits: one for the
# loss and one for the norm, which the program reads; two for each op that may refuse an operand (core/backend/cuda/ops/report.h).
MODELS = {
    "mlp": ([], 50, 4),
    "gpt-nano": (GPT, 164, 8),
    "resnet18": (["--image-size", "32", "--set", "width=8"], 1554, 4),
    "bert-mini": (GPT, 266, 8),
}


def counted(command, model, steps, work):
    file = Path(work) / "counters"
    done = subprocess.run(
        [*command, "--device", "cuda", "--model", model, "--batch-size", "4", "--steps", str(steps), *MODELS[model][0]],
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


def main():
    run, libraries, train, *models = sys.argv[1:]
    command = [run, "--libraries", libraries, train]
    failed = False
    for model in models or MODELS:
        _, most_launches, most_waits = MODELS[model]
        with tempfile.TemporaryDirectory() as work:
            (short, short_ops), (long, long_ops) = (counted(command, model, n, work) for n in (SHORT, LONG))
        steps, differ = LONG - SHORT, long - short

        def of(names):
            return {name: differ[name] / steps for name in names if differ[name]}

        allocations, waits, launches = of(ALLOCATING), of(WAITING), differ["cuLaunchKernel"] / steps
        kernels = ", ".join(f"{n / steps:g} {name}" for name, n in (long_ops - short_ops).most_common(6))
        print(f"{model}: per step {launches:g} launches (at most {most_launches}), {sum(waits.values()):g} waits of the host "
              f"(at most {most_waits}) {waits}, {sum(allocations.values()):g} calls that allocate {allocations}; "
              f"most of: {kernels}", flush=True)  # fmt: skip
        failed |= bool(allocations) or launches > most_launches or sum(waits.values()) > most_waits
    sys.exit(failed)


main()
