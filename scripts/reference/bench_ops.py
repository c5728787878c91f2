"""Times single operations of PyTorch on one pinned thread, fp32.

  cross_entropy   F.cross_entropy of [8192, 50304] logits, forward and backward (the gradient is allocated each time)
  adamw           one AdamW step over the parameters of GPT-2 small (148 tensors, 124.5 M values), one tensor at a time
  adamw_foreach   the same, multi-tensor
  adamw_fused     the same, fused kernel (PyTorch 2.4 and newer)
  add             x + y with 16 values, no autograd; per call, the interpreter's share included
  add_grad        the same where x needs a gradient, so that a backward node is made
  view            x.view(4, 4)
  transpose       x.t() of a 4 x 4

How: a sample is the median of a few runs (of many thousand calls each for the small ones). The large operations hold
their memory (5 GiB and 2 GiB) until another name is asked for or "free" is.

Usage: bench_ops.py [NAME...] [--repeats N] [--serve] [--cpu N] [--as-shipped]
The modes and what they print are in bench_common.py.
"""

import statistics
import time

import bench_common


class Workloads:
    """Builds each workload when it is first asked for and keeps only the last one."""

    def __init__(self):
        self.name, self.once, self.inner = None, None, 0

    def sample(self, name):
        if name != self.name:
            self.free()
            self.once, self.inner = BUILDERS[name]()
            self.name = name
        return statistics.median(self.once() for _ in range(self.inner))

    def free(self):
        self.name, self.once = None, None
        bench_common.give_back()


def timed(work):
    """Function that runs `work` once and returns milliseconds."""

    def once():
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e3

    return once


def cross_entropy():
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8192, 50304, generator=generator).requires_grad_()
    targets = torch.randint(50304, (8192,), generator=generator)

    def work():
        logits.grad = None
        F.cross_entropy(logits, targets).backward()

    return timed(work), 1


def gpt2_shapes():
    """Shapes of GPT-2 small's parameters, vocabulary padded to 50304."""
    width = 768
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50304, width), (1024, width), *(12 * block), (width,), (width,)]


def adamw(**options):
    import torch

    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in gpt2_shapes()]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **options
    )
    optimizer.step()  # creates the state
    return timed(optimizer.step), 1


def small(make, calls=20000):
    """Milliseconds per call of the function that `make` returns."""
    import torch

    call = make(torch)

    def once():
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) * 1e3 / calls

    return once, 5


def add(torch):
    x, y = torch.ones(16), torch.ones(16)
    return lambda: x + y


def add_grad(torch):
    x, y = torch.ones(16, requires_grad=True), torch.ones(16)
    return lambda: x + y


def view(torch):
    x = torch.ones(16)
    return lambda: x.view(4, 4)


def transpose(torch):
    x = torch.ones(4, 4)
    return lambda: x.t()


BUILDERS = {
    "cross_entropy": cross_entropy,
    "adamw": lambda: adamw(foreach=False),
    "adamw_foreach": lambda: adamw(foreach=True),
    "adamw_fused": lambda: adamw(fused=True),
    "add": lambda: small(add),
    "add_grad": lambda: small(add_grad),
    "view": lambda: small(view),
    "transpose": lambda: small(transpose),
}


def fused_works():
    """Whether this PyTorch has a fused AdamW for the CPU."""
    import torch

    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.zeros(1)
    try:
        torch.optim.AdamW([p], fused=True).step()
    except (TypeError, RuntimeError):
        return False
    return True


def main():
    options = bench_common.quiet("Times operations of PyTorch.")
    workloads = Workloads()
    names = [name for name in BUILDERS if name != "adamw_fused" or fused_works()]
    samplers = {name: (lambda name=name: workloads.sample(name)) for name in names}
    bench_common.run("bench_ops", samplers, options, workloads.free)


if __name__ == "__main__":
    main()
