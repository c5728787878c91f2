"""all_reduce between two processes by torch.distributed, as `bench collectives --only all_reduce` times ours: over Gloo, or with
--device cuda between two cards by NCCL.

How: before each call every rank writes its buffer, then a barrier; the mean over ranks of the call alone, the median over
calls. Each rank has one thread, on a core of its own. On cards calls follow each other after a barrier, and a rank waits once, after
the last. Prints the JSON of `bench collectives`.

Usage: all_reduce_pytorch.py [--cores A,B] [--device cpu|cuda]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

SECONDS = 0.2  # for each size, about
FEWEST, MOST = 9, 50000
MOST_IN_A_ROW = 1000


def seconds_of_a_call(dist, values):
    values.fill_(1.0)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(values)
    return time.perf_counter() - start


def seconds_on_card(torch, dist, values, calls):
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(values)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def median_on_cards(torch, dist, size):
    """Microseconds."""
    values = torch.ones(size // 4, device="cuda")
    once = [seconds_on_card(torch, dist, values, 1) for _ in range(3)][-1]
    calls = torch.tensor([min(MOST_IN_A_ROW, max(1, int(SECONDS / FEWEST / once)))], device="cuda")
    dist.broadcast(calls, 0)
    times = torch.tensor([seconds_on_card(torch, dist, values, int(calls)) for _ in range(FEWEST)], dtype=torch.float64, device="cuda")
    dist.all_reduce(times)
    return statistics.median((times / dist.get_world_size() * 1e6).tolist())


def median_of_calls(torch, dist, size):
    """Microseconds."""
    values = torch.empty(size // 4)
    for _ in range(3):
        once = seconds_of_a_call(dist, values)
    calls = torch.tensor([min(MOST, max(FEWEST, int(SECONDS / once)))])
    dist.broadcast(calls, 0)
    times = torch.tensor([seconds_of_a_call(dist, values) for _ in range(int(calls))], dtype=torch.float64)
    dist.all_reduce(times)
    return statistics.median((times / dist.get_world_size() * 1e6).tolist())


def run(rank, cores, device, rendezvous):
    os.sched_setaffinity(0, {cores[rank]})
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    on_card = device == "cuda"
    if on_card:
        if (cards := torch.cuda.device_count()) < len(cores):
            if rank != 0:
                os._exit(1)
            sys.exit(f"all_reduce_pytorch: --device cuda: PyTorch {torch.__version__} finds {cards} cards, and each of two ranks takes one")
        torch.cuda.set_device(rank)
    name = "nccl" if on_card else "gloo"
    dist.init_process_group(name, init_method=f"file://{rendezvous}", rank=rank, world_size=len(cores))
    median = median_on_cards if on_card else median_of_calls
    sizes = [4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 100 << 20]
    rows = [{"verb": "all_reduce", "bytes": n, "us": {"median": median(torch, dist, n)}} for n in sizes]
    dist.destroy_process_group()
    backend = f"PyTorch {'.'.join(torch.__version__.split('.')[:2])}, {name}"
    return {"result": {"ranks": len(cores), "backend": backend, "rows": rows}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", default="0,1", help="of the two ranks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    cores = [int(c) for c in options.cores.split(",")]
    if len(cores) != 2:
        parser.error(f"--cores names {len(cores)}: expected two, as in 2,3")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "store")
        child = os.fork()
        if child == 0:
            run(1, cores, options.device, rendezvous)
            os._exit(0)
        result = run(0, cores, options.device, rendezvous)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"rank 1 ended with status {status}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
