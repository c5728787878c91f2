"""Times one training step of gpt-nano in PyTorch eager: forward, backward, clipping, AdamW, fp32, one pinned thread.

How: 4 layers, 4 heads, width 128, context 64, vocabulary 65, batch 12, random tokens drawn beforehand. A sample is the
median over --steps consecutive steps. Attention is scaled_dot_product_attention where PyTorch has it and the plain form
elsewhere; the optimizer is what --optimizer says (`default` leaves the choice to PyTorch).

Usage: bench_gpt_nano.py [--repeats N] [--serve] [--cpu N] [--as-shipped] [--steps N] [--batch N]
                         [--optimizer default|foreach|fused]
The modes and what they print are in bench_common.py; the only name is "step".
"""

import statistics
import time

import bench_common


def add_options(parser):
    parser.add_argument("--steps", type=int, default=10, help="steps per sample")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default")


def make_sampler(options):
    import torch
    from torch.nn import functional as F

    from gpt import GPT, GPTConfig, adamw

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPTConfig()
    model = GPT(config, fused_attention=hasattr(F, "scaled_dot_product_attention"))
    choice = {} if options.optimizer == "default" else {options.optimizer: True}
    optimizer = adamw(model, 1e-3, (0.9, 0.99), 0.1, **choice)
    tokens = torch.randint(config.vocab, (options.steps, options.batch, config.context + 1))
    ids, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()

    def step(index):
        begin = time.perf_counter()
        loss = model.loss(ids[index], targets[index])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        return (time.perf_counter() - begin) * 1e3

    for index in range(options.steps):
        step(index)  # warm-up
    return lambda: statistics.median(step(index) for index in range(options.steps))


def main():
    options = bench_common.quiet("Times a gpt-nano step in PyTorch.", add_options)
    bench_common.run("bench_gpt_nano", {"step": make_sampler(options)}, options, lambda: None)


if __name__ == "__main__":
    main()
