#!/usr/bin/env python3
"""Learning: the gpt-nano recipe on one rank and on two; the loss over the whole validation split is at most 1.93.

How: Tiny Shakespeare by characters, 4 layers, 4 heads, width 128, context 64, batch 12 in all, 2,000 steps, dropout 0,
AdamW 1e-3 to 1e-4 (cosine, 100 steps of warm-up), betas 0.9/0.99, weight decay 0.1, clip 1.0. PyTorch 1.13 with this
recipe and measure (scripts/reference/train_gpt_shakespeare.py) gave 1.909 and 1.916 from two seeds.

Usage: learning.py [TEXT] [--build DIR] [--ranks 1,2] [--seed N]
"""

import sys

import common

LIMIT = 1.93
RECIPE = "--model gpt-nano --tokenizer char --batch-size 12 --steps 2000 --optimizer adamw --lr 1e-3 --min-lr 1e-4"
RECIPE += " --schedule cosine --warmup 100 --betas 0.9,0.99 --weight-decay 0.1 --clip-norm 1.0"


def main():
    p = common.parser(__doc__)
    common.add_text_argument(p)
    p.add_argument("--ranks", default="1,2", help="numbers of ranks (default: 1,2)")
    p.add_argument("--seed", default="1337")
    options = p.parse_args()
    common.check_text(options)
    print(f"{options.text}, {common.load()}")
    good = True
    for ranks in map(int, options.ranks.split(",")):
        steps, done = common.train(
            options, ranks, *RECIPE.split(), "--data", f"text:{options.text}", "--seed", options.seed
        )
        loss = done["val_loss"]
        good &= loss <= LIMIT
        print(
            f"{ranks} rank{'s' if ranks > 1 else ' '}  validation loss {loss:.4f} (limit {LIMIT})  last training loss"
            f" {steps[-1]['loss']:.4f}  {done['seconds']:.1f} s  {'ok' if loss <= LIMIT else 'MISSED'}",
            flush=True,
        )
    sys.exit(not good)


if __name__ == "__main__":
    main()
