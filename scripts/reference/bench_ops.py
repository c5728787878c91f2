"""Times single operations of PyTorch on one pinned thread, or on a card, fp32 but for names with _bf16.

  cross_entropy   F.cross_entropy of [8192, 50304] logits, forward and backward (the gradient is allocated each time)
  adamw           one AdamW step over the parameters of GPT-2 small (148 tensors, 124.5 M values), one tensor at a time
  adamw_foreach   the same, multi-tensor
  adamw_fused     the same, fused kernel (PyTorch 2.4 and newer)
  add             x + y with 16 values, no autograd; per call, the interpreter's share included
  add_grad        the same where x needs a gradient, so that a backward node is made
  view            x.view(4, 4)
  transpose       x.t() of a 4 x 4
  matmul_N        N x N x N; matmul_batched: 48 of 64 x 32 x 64; linear_skinny: [16, 768] through 768 x 3072
  conv3x3         8 images of 64 x 56 x 56 to 64 channels, channels-last; conv3x3_nchw: contiguous
  add_large, gelu_large, softmax_large, layer_norm_large    over [16384, 1024]
  attention       causal, 4 sequences of 1024, 12 heads of 64; attention_grad: and backward. scaled_dot_product_attention
                  where PyTorch has it, the plain form elsewhere

How: a sample is the median of a few runs of so many calls that they can be timed; on a card the program waits for it once,
after the last call of a run. The large operations hold their memory (5 GiB and 2 GiB) until another name is asked for or "free" is.

Usage: bench_ops.py [NAME...] [--repeats N] [--serve] [--cpu N] [--as-shipped] [--device cpu|cuda|cuda:N]
The modes and what they print are in bench_common.py.
"""

import statistics
import time

import bench_common


class Workloads:
    """Builds each workload when it is first asked for and keeps only the last one."""

    def __init__(self, options):
        self.name, self.once, self.inner, self.options = None, None, 0, options

    def sample(self, name):
        if name != self.name:
            self.free()
            with bench_common.made_on(self.options):
                self.once, self.inner = BUILDERS[name]()
            self.name = name
        return statistics.median(self.once() for _ in range(self.inner))

    def free(self):
        self.name, self.once = None, None
        bench_common.give_back()


def timed(work):
    """Function that runs `work` once and returns milliseconds."""

    def once():
        bench_common.wait()
        begin = time.perf_counter()
        work()
        bench_common.wait()
        return (time.perf_counter() - begin) * 1e3

    return once


def cross_entropy():
    import torch
    from torch.nn import functional as F

    torch.manual_seed(0)
    logits = torch.randn(8192, 50304).requires_grad_()
    targets = torch.randint(50304, (8192,))

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

    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s)) for s in gpt2_shapes()]
    for p in parameters:
        p.grad = torch.randn(p.shape)
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
        bench_common.wait()
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


def repeated(make):
    """Milliseconds per call of the function that `make` returns, so many calls that they fill 10 ms."""
    import torch

    call = make(torch)
    begin = time.perf_counter()
    call()
    bench_common.wait()
    calls = max(1, int(0.01 / max(time.perf_counter() - begin, 1e-6)))

    def once():
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        bench_common.wait()
        return (time.perf_counter() - begin) * 1e3 / calls

    return once, 5


def matmul(n, bf16=False):
    def make(torch):
        dtype = torch.bfloat16 if bf16 else torch.float32
        a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
        return lambda: a @ b

    return make


def matmul_batched(torch):
    q, k = torch.randn(48, 64, 32), torch.randn(48, 32, 64)
    return lambda: q @ k


def linear_skinny(torch):
    x, w = torch.randn(16, 768), torch.randn(3072, 768)
    return lambda: torch.nn.functional.linear(x, w)


def conv3x3(channels_last, bf16):
    def make(torch):
        kind = {"dtype": torch.bfloat16 if bf16 else torch.float32}
        if channels_last:
            kind["memory_format"] = torch.channels_last
        x, w = torch.randn(8, 64, 56, 56).to(**kind), torch.randn(64, 64, 3, 3).to(**kind)
        return lambda: torch.nn.functional.conv2d(x, w, padding=1)

    return make


def large(op):
    def make(torch):
        x, w = torch.randn(16384, 1024), torch.randn(1024)
        return lambda: op(torch.nn.functional, x, w)

    return make


def add_large(torch):
    x, y = torch.randn(16384, 1024), torch.randn(16384, 1024)
    return lambda: x + y


def attention(grad, bf16):
    def make(torch):
        import math

        dtype = torch.bfloat16 if bf16 else torch.float32
        q, k, v = (torch.randn(4, 12, 1024, 64).to(dtype).requires_grad_(grad) for _ in range(3))
        seed = torch.randn(4, 12, 1024, 64).to(dtype)
        fused = getattr(torch.nn.functional, "scaled_dot_product_attention", None)
        future = torch.ones(1024, 1024, dtype=torch.bool).triu(1)

        def forward():
            if fused:
                return fused(q, k, v, is_causal=True)
            scores = q @ k.transpose(-1, -2) / math.sqrt(64)
            return scores.masked_fill(future, -math.inf).softmax(-1) @ v

        def call():
            out = forward()
            if grad:
                q.grad = k.grad = v.grad = None
                out.backward(seed)

        return call

    return make


COMPARED = {
    **{f"matmul_{n}": matmul(n) for n in (64, 256, 1024, 2048)},
    **{f"matmul_{n}_bf16": matmul(n, bf16=True) for n in (1024, 2048)},
    "matmul_batched": matmul_batched,
    "linear_skinny": linear_skinny,
    **{
        f"conv3x3{layout}{precision}": conv3x3(not layout, bool(precision))
        for precision in ("", "_bf16")
        for layout in ("", "_nchw")
    },
    "add_large": add_large,
    "gelu_large": large(lambda F, x, w: F.gelu(x)),
    "softmax_large": large(lambda F, x, w: F.softmax(x, -1)),
    "layer_norm_large": large(lambda F, x, w: F.layer_norm(x, (1024,), w, w)),
    **{
        f"attention{grad}{precision}": attention(bool(grad), bool(precision))
        for precision in ("", "_bf16")
        for grad in ("", "_grad")
    },
}

BUILDERS = {
    "cross_entropy": cross_entropy,
    "adamw": lambda: adamw(foreach=False),
    "adamw_foreach": lambda: adamw(foreach=True),
    "adamw_fused": lambda: adamw(fused=True),
    "add": lambda: small(add),
    "add_grad": lambda: small(add_grad),
    "view": lambda: small(view),
    "transpose": lambda: small(transpose),
    **{name: (lambda make=make: repeated(make)) for name, make in COMPARED.items()},
}


def fused_works(options):
    """Whether this PyTorch has a fused AdamW for the device."""
    import torch

    p = torch.nn.Parameter(torch.zeros(1, device=options.device))
    p.grad = torch.zeros_like(p)
    try:
        torch.optim.AdamW([p], fused=True).step()
    except (TypeError, RuntimeError):
        return False
    return True


def main():
    options = bench_common.quiet("Times operations of PyTorch.")
    bench_common.use_device("bench_ops", options)
    workloads = Workloads(options)
    names = [name for name in BUILDERS if name != "adamw_fused" or fused_works(options)]
    samplers = {name: (lambda name=name: workloads.sample(name)) for name in names}
    bench_common.run("bench_ops", samplers, options, workloads.free)


if __name__ == "__main__":
    main()
