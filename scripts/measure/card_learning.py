#!/usr/bin/env python3
"""gpt-nano learns on a card as on the CPU: the losses at every 50th of 300 steps and the validation loss at the end differ by at most
0.02.

How: the recipe of learning.py with batches of 4 sequences of 32, on the first 50,000 characters of the text (a tenth of them
validates at the end, which is long on a virtual card), on both devices from the same seed. The card is the virtual GPU
(scripts/on-virtual-gpu), or with --card a real one. Both runs save every 50 steps to --work and go on from there, so an
interrupted measurement loses little.

Usage: card_learning.py [TEXT] [--build DIR] [--steps 300] [--seed N] [--card] [--work DIR]
"""

import json
import subprocess
import sys
from pathlib import Path

import common

LIMIT, EVERY = 0.02, 50
RECIPE = "--model gpt-nano --tokenizer char --batch-size 4 --seq-len 32 --optimizer adamw --lr 1e-3 --min-lr 1e-4"
RECIPE += " --schedule cosine --warmup 100 --betas 0.9,0.99 --weight-decay 0.1 --clip-norm 1.0"


def losses(options, device):
    """Step -> loss, and "validation" -> that of the end."""
    work = options.work / device
    work.mkdir(parents=True, exist_ok=True)
    metrics = work / "metrics.jsonl"
    command = [common.ROOT / "scripts/on-virtual-gpu", "--libraries", options.build / "vgpu"]
    command = command if device == "cuda" and not options.card else []
    text = work / "text.txt"
    text.write_bytes(options.text.read_bytes()[:50_000])
    command += [common.program(options, "train"), *RECIPE.split(), "--data", f"text:{text}", "--seed", options.seed]
    command += ["--device", device, "--steps", options.steps, "--metrics", metrics]
    command += ["--checkpoint", work / "saved", "--save-every", EVERY, "--keep", 1, "--resume"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    at_end = [row["val_loss"] for row in rows if row.get("event") == "done"]
    return {row["step"]: row["loss"] for row in rows if "loss" in row} | {"validation": at_end[-1] if at_end else float("nan")}


def main():
    p = common.parser(__doc__)
    common.add_text_argument(p)
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--seed", default="1337")
    p.add_argument("--card", action="store_true", help="a real card, not the virtual one")
    p.add_argument("--work", type=Path, help="what the runs keep (default: card-learning in the build folder)")
    options = p.parse_args()
    common.check_text(options)
    options.work = options.work or options.build / "card-learning"
    print(f"{options.text}, {common.load()}", flush=True)
    cpu, card = losses(options, "cpu"), losses(options, "cuda")
    good = len(cpu) == len(card) == options.steps + 1
    for step in [*range(EVERY, options.steps + 1, EVERY), "validation"]:
        apart = abs(cpu.get(step, float("nan")) - card.get(step, float("nan")))
        good &= apart <= LIMIT
        print(f"{step:>10}: {cpu.get(step)} on the CPU, {card.get(step)} on the card, {apart:.5f} apart (limit {LIMIT})")
    print("ok" if good else "MISSED")
    sys.exit(not good)


if __name__ == "__main__":
    main()
