"""Trains the 4-layer character GPT on a text file with PyTorch and prints the loss over the whole validation split.

How: the recipe that Tessera's `train --model gpt-nano` is compared with. 4 layers, 4 heads, width 128, context 64, batch
12, dropout 0, AdamW (betas 0.9/0.99, weight decay 0.1 on 2-D tensors), clip 1.0, learning rate 1e-3 with 100 steps of
linear warm-up and a cosine to 1e-4 at the last step. The vocabulary is the sorted set of characters of the file; the
first 90 % train, the rest validates. Batches are random windows. Validation covers non-overlapping windows of one
context each and all their positions, so it does not depend on a sample.

Usage: train_gpt_shakespeare.py FILE [--steps N] [--seed N] [--threads N]
Prints a line every 100 steps, then one JSON object: {torch, seed, steps, val_loss, train_loss, seconds}.
"""

import argparse
import json
import math
import time

import torch
from torch.nn import functional as F

from gpt import GPT, GPTConfig, adamw

BATCH = 12
LR, MIN_LR, WARMUP = 1e-3, 1e-4, 100


def read_characters(path):
    """Returns (training tokens, validation tokens, vocabulary size)."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([index[c] for c in text])
    cut = int(0.9 * len(tokens))
    return tokens[:cut], tokens[cut:], len(index)


def learning_rate(step, steps):
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return MIN_LR + 0.5 * (1.0 + math.cos(math.pi * progress)) * (LR - MIN_LR)


def random_windows(tokens, context):
    starts = torch.randint(len(tokens) - context, (BATCH,))
    windows = torch.stack([tokens[s : s + context + 1] for s in starts])
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def loss_over(model, tokens, context, windows_at_once=64):
    """Mean loss over all positions of the non-overlapping windows of `tokens`."""
    count = (len(tokens) - 1) // context
    ids = tokens[: count * context].view(count, context)
    targets = tokens[1 : count * context + 1].view(count, context)
    total = 0.0
    for x, y in zip(ids.split(windows_at_once), targets.split(windows_at_once)):
        total += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
    return total / (count * context)


def main():
    parser = argparse.ArgumentParser(description="Trains a small character GPT with PyTorch.")
    parser.add_argument("file")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    train, validation, vocab = read_characters(args.file)
    config = GPTConfig(vocab=vocab)
    model = GPT(config, fused_attention=hasattr(F, "scaled_dot_product_attention"))
    optimizer = adamw(model, LR, (0.9, 0.99), 0.1)
    begin = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        loss = model.loss(*random_windows(train, config.context))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    seconds = time.perf_counter() - begin
    result = {
        "torch": torch.__version__,
        "seed": args.seed,
        "steps": args.steps,
        "val_loss": loss_over(model, validation, config.context),
        "train_loss": loss.item(),
        "seconds": seconds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
