#!/usr/bin/env python3
"""What a step of `train --device cuda` costs beside its arithmetic: calls that allocate, waits of the host, launches.

  steps_on_card.py ON_VIRTUAL_GPU LIBRARIES TRAIN [MODEL ...]

How: runs of two, five and eight steps are counted on the virtual GPU (VGPU_COUNTERS). Steps 3 to 5 make no call that allocates: what
the first two make ahead (memory of the card, pinned slabs, events, streams) holds what later steps need, also those that the host
enqueues while others run; a graph is made in step 4, by calls that are not counted. Steps 6 to 8 are counted in full: those of a compiled step are launches of a graph, which step 4 captured.
Prints a line for each model and fails where a number is above its bound.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

EARLY, STEADY = (2, 5), (5, 8)  # lengths of runs whose counts are subtracted
ALLOCATING = ("cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuModuleLoadData",
              "cuMemHostAlloc", "cuMemFreeHost", "cuStreamCreateWithPriority", "cuEventCreate")  # fmt: skip
COPIES = ("copy ", "fill", "graph", "end of a graph")
BESIDE_GRAPH = 4  # launches: the host writes the learning rate of two groups of parameters, a number and its copy each
LIBRARIES = ("cublasLt", "cudnn")  # whose work is no launch of ours
WAITING = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "wait for a copy to pageable memory")

GPT = ["--set", "layers=2", "--set", "dim=32", "--set", "dropout=0.1", "--seq-len", "16"]
# Arguments; the most kernels in a step (forward, backward, clipping, update), as eager ops and compiled; the most waits. What cuBLASLt
# and cuDNN do is a kernel too; attention with dropout has a product for each sample. Bounds are what was measured: kernels are the same
# in every run, so one more is a change that somebody has to want. Waits: one for the loss and one for the norm, which the program reads.
MODELS = {
    "mlp": ([], 52, 37, 2),
    "gpt-nano": (GPT, 191, 158, 2),
    "gpt-nano in fp16": ([*GPT, "--precision", "fp16"], 259, 180, 2),  # the loss scale is not read
    "resnet18": (["--image-size", "32", "--set", "width=8"], 653, 403, 2),
    "bert-mini": (GPT, 298, 240, 2),
}


def counted(command, model, steps, work, compiled):
    file = Path(work) / "counters"
    done = subprocess.run(
        [*command, "--device", "cuda", "--model", model.split()[0], "--batch-size", "4", "--steps", str(steps), *MODELS[model][0],
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
    _, *most_kernels, most_waits = MODELS[model]
    most_kernels = most_kernels[compiled]
    with tempfile.TemporaryDirectory() as work:
        runs = {n: counted(command, model, n, work, compiled) for n in sorted({*EARLY, *STEADY})}

    def per_step(between, what):
        return {name: n / (between[1] - between[0]) for name, n in (runs[between[1]][what] - runs[between[0]][what]).items()}

    early, calls, ops = per_step(EARLY, 0), per_step(STEADY, 0), per_step(STEADY, 1)
    allocations = {name: n for name, n in early.items() if name in ALLOCATING}
    allocations |= {name: n for name, n in calls.items() if name in ALLOCATING}
    waits = {name: n for name, n in calls.items() if name in WAITING}
    by_libraries = sum(n for name, n in ops.items() if name.startswith(LIBRARIES))
    launches, graphs = calls.get("cuLaunchKernel", 0) + (0 if compiled else by_libraries), calls.get("cuGraphLaunch", 0)
    by_kernel = Counter({name: n for name, n in ops.items() if not name.startswith(COPIES)})
    kernels = by_kernel.total()
    most = ", ".join(f"{n:g} {name}" for name, n in by_kernel.most_common(6))
    print(f"{model}{' compiled' if compiled else ''}: a step has {kernels:g} kernels (at most {most_kernels}) in {launches:g} launches and "
          f"{graphs:g} of graphs, {sum(waits.values()):g} waits of the host (at most {most_waits}) {waits}, calls that allocate "
          f"{allocations}; most of: {most}", flush=True)  # fmt: skip
    enqueued = graphs == 1 and launches <= BESIDE_GRAPH if compiled else graphs == 0 and launches == kernels
    return not allocations and enqueued and kernels <= most_kernels and sum(waits.values()) <= most_waits


def main():
    run, libraries, train, *models = sys.argv[1:]
    command = [run, "--libraries", libraries, train]
    failed = False
    for model in models or MODELS:
        for compiled in (False, True):
            failed |= not within_bounds(command, model, compiled)
    sys.exit(failed)


main()
