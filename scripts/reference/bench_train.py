"""Times training steps in PyTorch, eager and through torch.compile: forward, backward, clipping, AdamW, the loss read, fp32
or bf16 autocast (names with _bf16, or --precision bf16 for all; it is around forward and loss), one pinned thread or a card.

How: gpt-nano (4 layers, 4 heads, width 128, context 64, vocabulary 65, batch 12), GPT-2 124M (one sequence of 512), an MLP
(784-256-256-10, batch 128), BERT-base (8 sequences of 128 or 2 of 512, 15 % of positions are targets, the head at every
position, no dropout), BERT-large (8 of 128, as BERT-base) and ResNet-50 (8 images of 224 x 224, channels-last, SGD with
momentum), on random inputs drawn beforehand; --batch-size and --seq-len say how many and how long else. A sample is the median
over consecutive steps; on a card it is the time between two of its events, over ten steps of which no loss is read. Attention is
scaled_dot_product_attention where PyTorch has it and the plain form elsewhere; the optimizer is what --optimizer says
(`default` leaves the choice to PyTorch). The compiled rows pass forward and loss through torch.compile (with them backward),
and the update (clipping, optimizer step) too, as its users would; they exist from PyTorch 2 on.

Usage: bench_train.py [names] [--repeats N] [--serve] [--cpu N] [--as-shipped] [--optimizer default|foreach|fused]
                      [--precision fp32|bf16] [--device cpu|cuda|cuda:N] [--batch-size N] [--seq-len N]
The modes and what they print are in bench_common.py; names: step, gpt2, mlp, bert, bert512, bertlarge, resnet50, each with _bf16,
_compiled or _bf16_compiled behind it.
"""

import statistics
import time

import bench_common

STEPS_ON_CARD = 10  # of a sample
# Model: batch, tokens (0: no sequences), batches
SIZES = {"step": (12, 64, 10), "gpt2": (1, 512, 1), "mlp": (128, 0, 100), "bert": (8, 128, 1), "bert512": (2, 512, 1),
         "bertlarge": (8, 128, 1), "resnet50": (8, 0, 1)}


def add_options(parser):
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--batch-size", type=int, default=0, help="0: that of the name")
    parser.add_argument("--seq-len", type=int, default=0, help="0: that of the name")
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default")


def gpt(torch, config, batch, length, count):
    from torch.nn import functional as F

    from gpt import GPT

    model = GPT(config, fused_attention=hasattr(F, "scaled_dot_product_attention"))
    tokens = torch.randint(config.vocab, (count, batch, length + 1))
    return model, model.loss, tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def mlp(torch, batch, count):
    from torch import nn
    from torch.nn import functional as F

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    inputs, targets = torch.randn(count, batch, 784), torch.randint(10, (count, batch))
    return model, lambda x, y: F.cross_entropy(model(x), y), inputs, targets


def bert(torch, batch, length, count, **sizes):
    from bert import Bert

    model = Bert(fused_attention=hasattr(torch.nn.functional, "scaled_dot_product_attention"), **sizes)
    ids = torch.randint(model.vocab, (count, batch, length))
    targets = torch.where(torch.rand(count, batch, length) < 0.15, ids, torch.tensor(-100))
    return model, model.loss, ids, targets


def resnet50(torch, batch, count):
    from resnet import ResNet

    model = ResNet(50).to(memory_format=torch.channels_last)
    images = [torch.randn(batch, 3, 224, 224).contiguous(memory_format=torch.channels_last) for _ in range(count)]
    return model, lambda x, y: torch.nn.functional.cross_entropy(model(x), y), images, torch.randint(1000, (count, batch))


def made(kind, options):
    """Model, its loss of inputs and targets, and these for each batch."""
    import torch

    from gpt import GPTConfig

    batch, length, count = SIZES[kind]
    batch, length = options.batch_size or batch, options.seq_len or length
    if kind == "step":
        return gpt(torch, GPTConfig(), batch, length, count)
    if kind == "gpt2":
        config = GPTConfig(layers=12, heads=12, dim=768, vocab=50257, context=1024, bias=True, gelu="tanh")
        return gpt(torch, config, batch, length, count)
    if kind == "bertlarge":
        return bert(torch, batch, length, count, layers=24, heads=16, dim=1024, hidden=4096)
    if kind == "resnet50":
        return resnet50(torch, batch, count)
    return mlp(torch, batch, count) if kind == "mlp" else bert(torch, batch, length, count)


def make_sampler(name, options):
    import torch

    from gpt import adamw

    torch.manual_seed(0)
    kind, *suffixes = name.split("_")
    compiled = "compiled" in suffixes
    bf16 = "bf16" in suffixes or options.precision == "bf16"
    count = SIZES[kind][2]
    with bench_common.made_on(options):
        model, loss_of, inputs, targets = made(kind, options)
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
            with torch.autocast(options.device.partition(":")[0], torch.bfloat16):
                return plain(x, y)

    if compiled:
        loss_of, update = torch.compile(loss_of), torch.compile(update)

    def enqueue(index):
        loss = loss_of(inputs[index], targets[index])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        update()
        return loss

    def step(index):
        begin = time.perf_counter()
        enqueue(index).item()
        return (time.perf_counter() - begin) * 1e3

    def on_card():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for index in range(STEPS_ON_CARD):
            enqueue(index % count)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / STEPS_ON_CARD

    for index in range(max(count, 3)):
        step(index % count)  # warm-up
    return on_card if options.device != "cpu" else lambda: statistics.median(step(index) for index in range(count))


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

    bench_common.use_device("bench_train", options)
    names = list(SIZES)
    names += [name + "_bf16" for name in names]
    if hasattr(torch, "compile"):
        names += [name + "_compiled" for name in names]
    bench_common.run("bench_train", {name: Lazy(name, options) for name in names}, options, Lazy.free)


if __name__ == "__main__":
    main()
