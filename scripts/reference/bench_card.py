"""Times training steps in PyTorch on a CUDA card, eager and through torch.compile: zero_grad, forward, backward, clipping, the
optimizer, the loss read. They are the steps that scripts/gpu-check times as `steps`.

How: gpt-nano in fp32 (12 sequences of 64), BERT-base (32 of 128), GPT-2 124M (8 of 1,024) and ResNet-50 (32 images of 224 x 224,
channels-last, SGD with momentum) in bf16 autocast, on one random batch, AdamW as PyTorch chooses it; the median of 15 steps
after 5. TF32 is off, as in Tessera. `ops`: ns until an op of 16 values is enqueued, the mean of 2,000.

Usage: bench_card.py [gpt-nano] [bert-base] [gpt2] [resnet50] [ops] [--eager]      prints a line as soon as a figure is known
"""

import argparse
import statistics
import time

import torch
from torch.nn import functional as F

from bert import Bert
from gpt import GPT, GPTConfig, adamw
from resnet import ResNet

CARD = "cuda"
GPT2 = {"layers": 12, "heads": 12, "dim": 768, "vocab": 50257, "context": 1024, "bias": True, "gelu": "tanh"}


def language(config, batch, length):
    model, ids = GPT(config, fused_attention=True), torch.randint(config.vocab, (batch, length + 1))
    return model.to(CARD), ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def made(name):
    """Model, its loss of (inputs, targets), optimizer and a batch."""
    torch.manual_seed(0)
    if name == "resnet50":
        model = ResNet(50).to(memory_format=torch.channels_last).to(CARD)
        x = torch.randn(32, 3, 224, 224).contiguous(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        return model, lambda a, b: F.cross_entropy(model(a), b), optimizer, x.to(CARD), torch.randint(1000, (32,)).to(CARD)
    if name == "bert-base":
        model = Bert(fused_attention=True).to(CARD)
        x = torch.randint(model.vocab, (32, 128))
        y = torch.where(torch.rand(32, 128) < 0.15, x, torch.tensor(-100))
    elif name == "gpt2":
        model, x, y = language(GPTConfig(**GPT2), 8, 1024)
    else:
        model, x, y = language(GPTConfig(), 12, 64)
    return model, model.loss, adamw(model, 1e-3, (0.9, 0.99), 0.1), x.to(CARD), y.to(CARD)


def time_steps(name, compiled):
    model, plain, optimizer, x, y = made(name)

    def loss_of(a, b):
        with torch.autocast(CARD, torch.bfloat16, enabled=name != "gpt-nano"):
            return plain(a, b)

    forward = torch.compile(loss_of) if compiled else loss_of

    def step():
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        return (time.perf_counter() - begin) * 1e3

    for _ in range(5):
        step()
    print(f"{name} {'compiled' if compiled else 'eager'}: {statistics.median(step() for _ in range(15)):.3f} ms", flush=True)


def time_ops():
    def enqueued(f, calls=2000):
        for _ in range(50):
            f()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            f()
        return (time.perf_counter() - begin) / calls * 1e9

    x, y, one = torch.ones(16, device=CARD), torch.ones(16, device=CARD), torch.ones((), device=CARD)
    a, b = x.view(4, 4), y.view(4, 4)
    with torch.no_grad():
        for name, f in (("empty", lambda: torch.empty(16, device=CARD)), ("add", lambda: x + y), ("mul_number", lambda: x * 2.0),
                        ("sum", lambda: x.sum()), ("matmul 4 x 4 x 4", lambda: torch.mm(a, b)), ("item", one.item)):
            print(f"{name}: {enqueued(f):.0f} ns", flush=True)


def main():
    models = ["gpt-nano", "bert-base", "resnet50", "gpt2"]
    parser = argparse.ArgumentParser(description="Times training steps in PyTorch on a CUDA card.")
    parser.add_argument("names", nargs="*", help="what to time; everything by default")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    options.names = options.names or [*models, "ops"]
    if unknown := set(options.names) - {*models, "ops"}:
        parser.error(f"unknown {sorted(unknown)}, expected {', '.join(models)} or ops")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    if "ops" in options.names:
        time_ops()
    for compiled in (False,) if options.eager else (False, True):
        for name in models:
            if name in options.names:
                time_steps(name, compiled)


if __name__ == "__main__":
    main()
