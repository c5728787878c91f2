"""What the timing programs share: a quiet process, the options, and the two ways to run.

A timing program gives run() a dict NAME -> function returning one sample in milliseconds (a median over a few inner
repetitions, so that one sample is meaningful by itself).

Two ways to run:
  batch  (default) one JSON object: {program, torch, settings, results: {NAME: {"median_ms", "min_ms", "samples_ms"}}}
  serve  (--serve) for a driver that alternates two programs A-B-A-B. On start one JSON line {program, torch, settings,
         names}. Then for each line "go NAME" on stdin ("go" alone when there is one name) one sample is taken and
         one JSON line {"name", "ms"} is printed; "free" drops the memory held for the last name and prints {"free":
         true}. An unknown line prints {"error"}. "quit" or the end of stdin ends the program.

Call quiet() before importing torch: it reads the options, pins the process and sets the library variables. Programs that take
--device call use_device() then; what they make inside made_on() is on that device, and wait() returns when it has done all. A
process whose work a card does is not pinned.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import statistics
import sys

# Without these Debian's OpenBLAS takes AVX2 kernels on recent AMD cores; current PyTorch brings MKL and ignores the first.
TUNED = {"OPENBLAS_CORETYPE": "SKYLAKEX", "ATEN_CPU_CAPABILITY": "avx512"}


def device_name(text):
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected cpu, cuda or cuda:N")
    return text


def quiet(description, add_options=None, devices=True):
    """Parses the options, binds this process to one core and one thread. Returns the options. `devices`: takes --device."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", help="what to time; everything by default")
    parser.add_argument("--repeats", type=int, default=9, help="samples per name in batch mode")
    parser.add_argument("--serve", action="store_true", help="time on demand, see bench_common.py")
    parser.add_argument("--cpu", type=int, help="core to run on; the last allowed one by default")
    parser.add_argument("--as-shipped", action="store_true", help="leave library settings alone")
    if devices:
        parser.add_argument("--device", type=device_name, default="cpu", help="cpu, cuda or cuda:N")
    if add_options:
        add_options(parser)
    options = parser.parse_args()
    if devices and options.device != "cpu":
        if options.cpu is not None:
            parser.error(f"--cpu {options.cpu}: a process is not bound to a core with --device {options.device}")
        return options
    if options.cpu is None:
        options.cpu = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {options.cpu})
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    if not options.as_shipped:
        for name, value in TUNED.items():
            os.environ.setdefault(name, value)
    return options


wait = lambda: None  # returns when the device has done all


def use_device(program, options):
    """Ends the program where PyTorch cannot use options.device; prepares it, with products of f32 as in Tessera, else."""
    global wait
    if options.device == "cpu":
        return
    import torch

    index = int(options.device.partition(":")[2] or 0)
    cards = torch.cuda.device_count()
    if index >= cards:
        found = f"{cards} cards" if cards else "no card"
        sys.exit(f"{program}: --device {options.device}: PyTorch {torch.__version__} finds {found}; use cpu, or install a driver and a PyTorch with CUDA")
    torch.cuda.set_device(index)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    wait = torch.cuda.synchronize


def made_on(options):
    """A context in which tensors are made on options.device. It slows small operations, so nothing is timed in it."""
    import torch

    return contextlib.nullcontext() if options.device == "cpu" else torch.device(options.device)


def give_back():
    """Returns freed memory to the system, so that large cases do not add up."""
    ctypes.CDLL(None).malloc_trim(0)


def run(program, samplers, options, free):
    """Runs in the mode asked for. `free()` drops what the samplers hold between samples."""
    import torch

    on_card = getattr(options, "device", "cpu") != "cpu"
    if not on_card:
        torch.set_num_threads(1)
    unknown = set(options.names) - set(samplers)
    if unknown:
        sys.exit(f"{program}: unknown {sorted(unknown)}, one of {sorted(samplers)}")
    names = options.names or list(samplers)
    header = {
        "program": program,
        "torch": torch.__version__,
        "settings": {"device": options.device, "card": torch.cuda.get_device_name(), "cuda": torch.version.cuda,
                     "cudnn": torch.backends.cudnn.version()}
        if on_card
        else {"cpu": options.cpu, "threads": 1, **{name: os.environ.get(name) for name in TUNED}},
    }
    if options.serve:
        serve({**header, "names": names}, samplers, names, free)
    else:
        print(json.dumps({**header, "results": batch(samplers, names, options.repeats, free)}))


def batch(samplers, names, repeats, free):
    results = {}
    for name in names:
        samplers[name]()  # warm-up: allocations, lazily built kernels
        samples = [samplers[name]() for _ in range(repeats)]
        free()
        results[name] = {
            "median_ms": statistics.median(samples),
            "min_ms": min(samples),
            "samples_ms": samples,
        }
    return results


def serve(header, samplers, names, free):
    def say(answer):
        print(json.dumps(answer), flush=True)

    say(header)
    for line in sys.stdin:
        words = line.split()
        if words == ["quit"]:
            return
        if words == ["free"]:
            free()
            say({"free": True})
        elif words[:1] == ["go"] and len(words) <= 2:
            name = words[1] if len(words) == 2 else names[0]
            known = name in samplers and (len(words) == 2 or len(names) == 1)
            say({"name": name, "ms": samplers[name]()} if known else {"error": line.strip()})
        else:
            say({"error": line.strip()})
