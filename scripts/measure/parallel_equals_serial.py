#!/usr/bin/env python3
"""Parallel = serial: every model under every strategy has one rank's losses over 50 steps; bit for bit if asked.

How: gpt-nano on text, the other models on random values, batch 16 in all (images: 32), with and without dropout where a
model has it. Plain: losses agree with one rank's to 1e-6 (relative) at step 1 and to 1e-3 at step 50. A ResNet is
compared with one rank that has as many micro-batches, since each is normalised by its own statistics; its rate is low
enough that rounding does not grow. Bits are those of gpt-nano: with --deterministic every loss, every gradient norm and params_xxh128 are equal under
strategies that keep contractions whole (ddp, fsdp, hsdp), and under tp and fsdp+tp with --exact-contraction. Compiled
runs, one rank's too, are held to the plain limits against one eager rank, and compiled deterministic ones to its bits. Parameters as they are drawn have one hash under all.
With --cards the ranks are on virtual cards, with smaller models, and one rank of the CPU is what they are compared with; bits are
those of one rank on a card.

Usage: parallel_equals_serial.py [TEXT] [--build DIR] [--steps 50] [--modes plain,compiled] [--models resnet18] [--cards] [--results FILE]
"""

import sys
from pathlib import Path

import common

FIRST, LAST = 1e-6, 1e-3
IMAGES = ["--batch-size", 32, "--image-size", 16, "--set", "width=8", "--optimizer", "sgd", "--lr", 0.0005, "--clip-norm", 0]
MODELS = {  # flags, of random values where they name no data
    "gpt-nano": ["--batch-size", 16],
    "bert-mini": ["--batch-size", 16, "--set", "vocab=500", "--seq-len", 32],
    "resnet18": IMAGES,
    "mlp": ["--batch-size", 16, "--set", "layers=3"],
}
SMALL = {  # of random values: virtual cards are slow
    "gpt-nano": ["--set", "layers=4", "--set", "dim=32", "--seq-len", 16],
    "bert-mini": ["--set", "layers=4", "--set", "dim=32", "--seq-len", 16],
}
SPREADS = [
    (2, []),
    (4, []),
    (2, ["--strategy", "fsdp"]),
    (4, ["--strategy", "fsdp"]),
    (4, ["--strategy", "hsdp", "--mesh", "replicate=2,shard=2"]),
    (2, ["--strategy", "tp"]),
    (4, ["--strategy", "tp"]),
    (4, ["--strategy", "fsdp+tp", "--mesh", "dp=2,tp=2"]),
    (8, ["--strategy", "hsdp+tp", "--mesh", "replicate=2,shard=2,tp=2"]),
    (2, ["--strategy", "pp", "--accumulate", "4"]),
    (4, ["--strategy", "pp", "--accumulate", "4"]),
    (4, ["--strategy", "pp", "--mesh", "dp=2,pp=2", "--accumulate", "2"]),
]


def micro_batches(ranks, spread):
    """Of a step: a data-parallel rank has --accumulate of them."""
    axes = dict(axis.split("=") for axis in spread[spread.index("--mesh") + 1].split(",")) if "--mesh" in spread else {}
    strategy = spread[1] if spread else "ddp"
    copies = 1
    for axis in ("dp", "replicate", "shard"):
        copies *= int(axes.get(axis, 1))
    if not axes and strategy in ("ddp", "fsdp"):
        copies = ranks
    return copies * (int(spread[spread.index("--accumulate") + 1]) if "--accumulate" in spread else 1)


def compare_plain(serial, parallel):
    def difference(step):
        a, b = serial[0][step]["loss"], parallel[0][step]["loss"]
        return abs(a - b) / abs(a)

    first, last = difference(0), difference(-1)
    return first <= FIRST and last <= LAST, f"step 1 differs by {first:.1e} (limit {FIRST:.0e}), the last by {last:.1e} (limit {LAST:.0e})"


def compare_bits(serial, parallel):
    def numbers(run):
        return [(line["loss"], line["grad_norm"]) for line in run[0]]

    same_losses = numbers(serial) == numbers(parallel)
    hashes = serial[1]["params_xxh128"], parallel[1]["params_xxh128"]
    text = f"losses {'equal' if same_losses else 'DIFFER'}, parameters {hashes[1]}"
    return same_losses and hashes[0] == hashes[1], text


def main():
    p = common.parser(__doc__)
    common.add_text_argument(p)
    p.add_argument("--steps", default="50")
    p.add_argument("--modes", help="plain,deterministic,exact,compiled,compiled bits; all by default")
    p.add_argument("--models", default=",".join(MODELS), help=f"all by default: {','.join(MODELS)}")
    p.add_argument("--cards", action="store_true")
    p.add_argument("--results", type=Path, metavar="FILE", help="finished runs are kept here, and not taken again")
    options = p.parse_args()
    options.kept = None
    if options.results:
        of = {"program": common.digest(common.program(options, "train")), "steps": options.steps, "cards": options.cards}
        options.kept = common.Kept(options.results, of)
    good = True
    for model in options.models.split(","):
        if model not in MODELS:
            sys.exit(f"parallel_equals_serial.py: no model {model}; there are {', '.join(MODELS)}")
        good &= compare(options, model)
    sys.exit(not good)


def shown(options, row, judge):
    """Prints a row and what `judge` says of it, or said before; returns whether it holds."""
    kept = [part for part in options.kept.parts if part["row"] == row] if options.kept else []
    if kept:
        ok, text = kept[0]["ok"], kept[0]["text"]
    else:
        ok, text = judge()
        if options.kept:
            options.kept.add({"row": row, "ok": ok, "text": text})
    print(f"{row}: {text}  {'ok' if ok else 'MISSED'}", flush=True)
    return ok


def compare(options, model):
    data = ["--model", model, *MODELS[model]]
    if options.cards and model in SMALL:
        data += SMALL[model]
    elif model == "gpt-nano":
        common.check_text(options)
        data += ["--data", f"text:{options.text}"]
    flags = [*data, "--steps", options.steps]
    good = True
    drawn = common.train(options, 1, *data, "--steps", 0)[1]["params_xxh128"]

    def judge_drawn():
        same = common.train(options, ranks, *data, "--steps", 0, *spread, cards=options.cards)[1]["params_xxh128"] == drawn
        return same, f"parameters {'equal' if same else 'DIFFER'}"

    for ranks, spread in SPREADS:
        good &= shown(options, f"{model:<10} {'as drawn':<14} {ranks} {' '.join(spread)}", judge_drawn)
    whole = ["--deterministic"]
    modes = {  # what every run of the mode has, what only those that are compared with one rank have
        "plain": ([], []),
        "compiled": ([], ["--compile"]),
    }
    if model == "gpt-nano":
        modes |= {
            "deterministic": (whole, []),
            "exact": ([*whole, "--exact-contraction"], []),
            "compiled bits": (whole, ["--compile"]),
        }
    for name, (extra, parallel_only) in modes.items():
        if options.modes and name not in options.modes.split(","):
            continue
        for dropout in ("none",) if model == "resnet18" else ("0", "0.1"):
            mode = [*flags, *([] if dropout == "none" else ["--set", f"dropout={dropout}"]), *extra]
            serial = {}  # by the number of micro-batches
            for ranks, spread in SPREADS + ([(1, [])] if parallel_only else []):
                how = " ".join(spread) or "--strategy ddp"
                if extra and "pp" in spread or name in ("deterministic", "compiled bits") and "tp" in how:
                    continue  # equal to rounding only
                parts = micro_batches(ranks, spread) if model == "resnet18" else 1

                def judge():
                    if parts not in serial:
                        more = ["--accumulate", parts] if parts > 1 else []
                        serial[parts] = common.train(options, 1, *mode, *more, cards=options.cards and bool(extra))
                    run = common.train(options, ranks, *mode, *parallel_only, *spread, cards=options.cards)
                    return (compare_bits if extra else compare_plain)(serial[parts], run)

                good &= shown(options, f"{model:<10} {name:<14} dropout {dropout:<4} {ranks} ranks {how}", judge)
    return good


if __name__ == "__main__":
    main()
