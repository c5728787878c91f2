"""Trains BERT-mini on a text file by masked language modelling, with PyTorch and transformers, and prints its loss.

How: the recipe that Tessera's `train --model bert-mini --data mlm:` is compared with in scripts/measure/learning_pytorch.py.
A row is [CLS], tokens of a random window, [SEP]; 15 % of the tokens (as many in each row) are targets, of which 80 % become
[MASK], 10 % a random token, 10 % stay. AdamW (betas 0.9/0.999, weight decay on weights of two dims and more), gradients
clipped to 1, learning rate with linear warm-up and a line to 0. The loss is over the windows of the other file that do not
overlap, each masked once.

Usage: learn_bert.py TRAIN VALIDATION VOCABULARY [--steps N] [--batch N] [--length N] [--lr F] [--warmup N] [--weight-decay F]
       [--precision fp32|bf16] [--seed N] [--threads N]
Prints a line every 20 steps, then one JSON object: {torch, seed, steps, val_loss, seconds}.
"""

import argparse
import contextlib
import json
import time

import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

IGNORED = -100


def tokens_of(path, tokenizer):
    with open(path, encoding="utf-8") as file:
        pieces = tokenizer.tokenize(file.read())
    return torch.tensor(tokenizer.convert_tokens_to_ids(pieces))


def masked(windows, tokenizer, generator):
    """windows [B, T - 2] -> (inputs, targets), both [B, T]."""
    rows, words = windows.shape
    count = max(1, round(0.15 * words))
    inputs, targets = windows.clone(), torch.full_like(windows, IGNORED)
    chosen = torch.rand(rows, words, generator=generator).argsort(1)[:, :count]
    targets.scatter_(1, chosen, windows.gather(1, chosen))
    fate = torch.rand(rows, count, generator=generator)
    drawn = torch.randint(len(tokenizer), (rows, count), generator=generator)
    kept = windows.gather(1, chosen)
    new = torch.where(fate < 0.8, tokenizer.mask_token_id, torch.where(fate < 0.9, drawn, kept))
    inputs.scatter_(1, chosen, new)
    ends = torch.full((rows, 1), tokenizer.cls_token_id), torch.full((rows, 1), tokenizer.sep_token_id)
    inputs = torch.cat([ends[0], inputs, ends[1]], 1)
    none = torch.full((rows, 1), IGNORED)
    return inputs, torch.cat([none, targets, none], 1)


def learning_rate(step, options):
    if step < options.warmup:
        return options.lr * (step + 1) / (options.warmup + 1)
    return options.lr * (1 - (step - options.warmup) / max(1, options.steps - options.warmup))


@torch.no_grad()
def loss_over(model, tokens, options, tokenizer, precision):
    model.eval()
    generator = torch.Generator().manual_seed(options.seed)
    words = options.length - 2
    windows = tokens[: len(tokens) // words * words].view(-1, words)
    total = 0.0
    for part in windows.split(64):
        inputs, targets = masked(part, tokenizer, generator)
        with precision():
            total += model(input_ids=inputs, labels=targets).loss.item() * len(part)
    return total / len(windows)


def main():
    parser = argparse.ArgumentParser(description="Trains BERT-mini with PyTorch.")
    parser.add_argument("train")
    parser.add_argument("validation")
    parser.add_argument("vocabulary")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    def precision():
        return torch.autocast("cpu", torch.bfloat16) if options.precision == "bf16" else contextlib.nullcontext()

    tokenizer = BertTokenizer(options.vocabulary, do_lower_case=True)
    train, validation = (tokens_of(path, tokenizer) for path in (options.train, options.validation))
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 1024}
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **shape))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.999))
    generator = torch.Generator().manual_seed(options.seed)
    words = options.length - 2
    begin = time.perf_counter()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        starts = torch.randint(len(train) - words + 1, (options.batch,), generator=generator)
        inputs, targets = masked(torch.stack([train[s : s + words] for s in starts]), tokenizer, generator)
        with precision():
            loss = model(input_ids=inputs, labels=targets).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step + 1 == options.steps:
            print(f"step {step + 1} loss {loss.item():.4f} {(time.perf_counter() - begin) / (step + 1):.3f} s/step", flush=True)
    seconds = time.perf_counter() - begin
    result = {"torch": torch.__version__, "seed": options.seed, "steps": options.steps}
    result |= {"val_loss": loss_over(model, validation, options, tokenizer, precision), "seconds": seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
