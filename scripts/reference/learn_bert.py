"""Trains BERT-mini on a text file by masked language modelling, with PyTorch and transformers, and prints its loss.

How: the recipe that Tessera's `train --model bert-mini --data mlm:` is compared with in scripts/measure/learning_pytorch.py.
A row is [CLS], tokens of a random window, [SEP]; 15 % of the tokens (as many in each row) are targets, of which 80 % become
[MASK], 10 % a random token, 10 % stay. Rows and targets are those that Tessera draws for the seed (masked_draws.py), so from
the same --weights nothing but dropout differs. AdamW (betas 0.9/0.999, weight decay on weights of two dims and more),
gradients clipped to 1, learning rate with linear warm-up and a line to 0. The loss is over the windows of the other file
that do not overlap, each masked once. The head runs on the targets alone, whose logits are all that the loss is made of.

Usage: learn_bert.py TRAIN VALIDATION VOCABULARY [--steps N] [--batch N] [--length N] [--lr F] [--warmup N] [--weight-decay F]
       [--precision fp32|bf16] [--seed N] [--threads N] [--weights FOLDER]
FOLDER (config.json, model.safetensors) has the initial weights; without it they are drawn by transformers.
Prints a line every 20 steps, then one JSON object: {torch, seed, steps, val_loss, seconds}.
"""

import argparse
import contextlib
import json
import time

import masked_draws
import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizer


def tokens_of(path, tokenizer):
    with open(path, encoding="utf-8") as file:
        pieces = tokenizer.tokenize(file.read())
    return np.array(tokenizer.convert_tokens_to_ids(pieces))


def rows(tokens, numbers, options, tokenizer, random_windows):
    """(inputs, targets), both i64 [B, T]."""
    t = tokenizer
    ids = t.cls_token_id, t.sep_token_id, t.mask_token_id
    drawn = masked_draws.rows(tokens, numbers, options.seed, options.length, len(t), *ids, random_windows)
    return map(torch.from_numpy, drawn)


def loss_of(model, inputs, targets):
    """The mean over targets, as model(input_ids=inputs, labels=targets).loss without the logits that it leaves out."""
    chosen = targets != masked_draws.IGNORED
    hidden = model.bert(input_ids=inputs).last_hidden_state
    return torch.nn.functional.cross_entropy(model.cls(hidden[chosen]), targets[chosen])


def learning_rate(step, options):
    if step < options.warmup:
        return options.lr * (step + 1) / (options.warmup + 1)
    return options.lr * (1 - (step - options.warmup) / max(1, options.steps - options.warmup))


@torch.no_grad()
def loss_over(model, tokens, options, tokenizer, precision):
    model.eval()
    count, total = len(tokens) // (options.length - 2), 0.0
    for begin in range(0, count, 64):
        numbers = range(begin, min(begin + 64, count))
        inputs, targets = rows(tokens, numbers, options, tokenizer, random_windows=False)
        with precision():
            total += loss_of(model, inputs, targets).item() * len(numbers)
    return total / count


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
    parser.add_argument("--weights")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    def precision():
        return torch.autocast("cpu", torch.bfloat16) if options.precision == "bf16" else contextlib.nullcontext()

    tokenizer = BertTokenizer(options.vocabulary, do_lower_case=True)
    train, validation = (tokens_of(path, tokenizer) for path in (options.train, options.validation))
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 1024}
    if options.weights:
        model = BertForMaskedLM.from_pretrained(options.weights)
    else:
        model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **shape))
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.999))
    begin = time.perf_counter()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        numbers = range(step * options.batch, (step + 1) * options.batch)
        inputs, targets = rows(train, numbers, options, tokenizer, random_windows=True)
        with precision():
            loss = loss_of(model, inputs, targets)
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
