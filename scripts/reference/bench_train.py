"""Times training steps in PyTorch, eager and through torch.compile: forward, backward, clipping, AdamW, the loss read, fp32
or bf16 autocast (names with _bf16, or --precision bf16 for all; it is around forward and loss), one pinned thread.

How: gpt-nano (4 layers, 4 heads, width 128, context 64, vocabulary 65, batch 12), GPT-2 124M (one sequence of 512), an MLP
(784-256-256-10, batch 128), BERT-base (8 sequences of 128 or 2 of 512, 15 % of positions are targets, the head at every
position, no dropout) and ResNet-50 (8 images of 224 x 224, channels-last, SGD with momentum), on random inputs drawn beforehand. A sample is the median over consecutive steps. Attention is
scaled_dot_product_attention where PyTorch has it and the plain form elsewhere; the optimizer is what --optimizer says
(`default` leaves the choice to PyTorch). The compiled rows pass forward and loss through torch.compile (with them backward),
and the update (clipping, optimizer step) too, as its users would; they exist from PyTorch 2 on.

Usage: bench_train.py [names] [--repeats N] [--serve] [--cpu N] [--as-shipped] [--optimizer default|foreach|fused]
                      [--precision fp32|bf16]
The modes and what they print are in bench_common.py; names: step, gpt2, mlp, bert, bert512, resnet50, each with _bf16, _compiled or
_bf16_compiled behind it.
"""

import statistics
import time

import bench_common


def add_options(parser):
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default")


def gpt(torch, config, batch, length, count):
    from torch.nn import functional as F

    from gpt import GPT

    model = GPT(config, fused_attention=hasattr(F, "scaled_dot_product_attention"))
    tokens = torch.randint(config.vocab, (count, batch, length + 1))
    return model, model.loss, tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def mlp(torch, count):
    from torch import nn
    from torch.nn import functional as F

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    inputs, targets = torch.randn(count, 128, 784), torch.randint(10, (count, 128))
    return model, lambda x, y: F.cross_entropy(model(x), y), inputs, targets


def bert(torch, batch, length, count):
    from bert import Bert

    model = Bert(fused_attention=hasattr(torch.nn.functional, "scaled_dot_product_attention"))
    ids = torch.randint(model.vocab, (count, batch, length))
    targets = torch.where(torch.rand(count, batch, length) < 0.15, ids, torch.tensor(-100))
    return model, model.loss, ids, targets


def resnet50(torch, count):
    from resnet import ResNet

    model = ResNet(50).to(memory_format=torch.channels_last)
    images = [torch.randn(8, 3, 224, 224).contiguous(memory_format=torch.channels_last) for _ in range(count)]
    return model, lambda x, y: torch.nn.functional.cross_entropy(model(x), y), images, torch.randint(1000, (count, 8))


def make_sampler(name, options):
    import torch

    from gpt import GPTConfig, adamw

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, *suffixes = name.split("_")
    compiled = "compiled" in suffixes
    bf16 = "bf16" in suffixes or options.precision == "bf16"
    count = {"step": 10, "mlp": 100}.get(kind, 1)
    if kind == "step":
        model, loss_of, inputs, targets = gpt(torch, GPTConfig(), 12, 64, count)
    elif kind == "gpt2":
        config = GPTConfig(layers=12, heads=12, dim=768, vocab=50257, context=1024, bias=True, gelu="tanh")
        model, loss_of, inputs, targets = gpt(torch, config, 1, 512, count)
    elif kind == "bert":
        model, loss_of, inputs, targets = bert(torch, 8, 128, count)
    elif kind == "bert512":
        model, loss_of, inputs, targets = bert(torch, 2, 512, count)
    elif kind == "resnet50":
        model, loss_of, inputs, targets = resnet50(torch, count)
    else:
        model, loss_of, inputs, targets = mlp(torch, count)
    choice = {} if options.optimizer == "default" else {options.optimizer: True}
    if kind == "resnet50":
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    else:
        optimizer = adamw(model, 1e-3, (0.9, 0.99), 0.1, **choice)

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    if bf16:
        plain = loss_of

        def loss_of(x, y):
            with torch.autocast("cpu", torch.bfloat16):
                return plain(x, y)

    if compiled:
        loss_of, update = torch.compile(loss_of), torch.compile(update)

    def step(index):
        begin = time.perf_counter()
        loss = loss_of(inputs[index], targets[index])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        update()
        loss.item()
        return (time.perf_counter() - begin) * 1e3

    for index in range(max(count, 3)):
        step(index % count)  # warm-up
    return lambda: statistics.median(step(index) for index in range(count))


class Lazy:
    """Makes its sampler at the first sample, so that one model at a time holds memory."""

    held = None

    def __init__(self, name, options):
        self.name, self.options = name, options

    def __call__(self):
        if Lazy.held is None or Lazy.held[0] != self.name:
            Lazy.held = None
            Lazy.held = (self.name, make_sampler(self.name, self.options))
        return Lazy.held[1]()

    @staticmethod
    def free():
        Lazy.held = None


def main():
    options = bench_common.quiet("Times training steps in PyTorch.", add_options)
    import torch

    names = ["step", "gpt2", "mlp", "bert", "bert512", "resnet50"]
    names += [name + "_bf16" for name in names]
    if hasattr(torch, "compile"):
        names += [name + "_compiled" for name in names]
    bench_common.run("bench_train", {name: Lazy(name, options) for name in names}, options, Lazy.free)


if __name__ == "__main__":
    main()
