"""all_reduce between two processes by torch.distributed over Gloo, as `bench collectives --only all_reduce` times ours.

How: before each call every rank writes its buffer, then a barrier; the mean over ranks of the call alone, the median over
calls. Each rank has one thread, on a core of its own. Prints the JSON of `bench collectives`.

Usage: all_reduce_pytorch.py [--cores A,B]
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


def seconds_of_a_call(dist, values):
    values.fill_(1.0)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(values)
    return time.perf_counter() - start


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


def run(rank, cores, rendezvous):
    os.sched_setaffinity(0, {cores[rank]})
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=len(cores))
    sizes = [4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 100 << 20]
    rows = [{"verb": "all_reduce", "bytes": n, "us": {"median": median_of_calls(torch, dist, n)}} for n in sizes]
    dist.destroy_process_group()
    backend = f"PyTorch {'.'.join(torch.__version__.split('.')[:2])}, gloo"
    return {"result": {"ranks": len(cores), "backend": backend, "rows": rows}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", default="0,1", help="of the two ranks")
    cores = [int(c) for c in parser.parse_args().cores.split(",")]
    if len(cores) != 2:
        parser.error(f"--cores names {len(cores)}: expected two, as in 2,3")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "store")
        child = os.fork()
        if child == 0:
            run(1, cores, rendezvous)
            os._exit(0)
        result = run(0, cores, rendezvous)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"rank 1 ended with status {status}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
