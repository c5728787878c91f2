#!/usr/bin/env python3
"""Learning beside PyTorch: the same recipe by `tlaunch --nproc 2 train` and by a script of scripts/reference, per seed.

How: every run leaves a file in --results, and a run whose file is there is not taken again, so runs can be spread over
time and machines. Printed is a table in Markdown: what each seed reached on the data that validate, means and standard
deviations. resnet18: seeds name different draws on the two sides, so the spread over seeds is what differences are to be
judged by. bert-mini: a seed names the same initial weights, and the same rows with the same targets, on both sides, which
differ in dropout alone.

Recipes:
  resnet18   an archive with train/ and test/ class folders of 32 x 32 images: 624 steps of 128 (eight epochs of 10,000), SGD
             with Nesterov momentum 0.9, 0.05 after 80 steps of warm-up, cosine to 0, weight decay 5e-4, label smoothing
             0.1, shifted and mirrored images, bf16, batch-norm by the 64 images of a rank.
  bert-mini  a folder with train.txt, validation.txt and vocab.txt (WordPiece): masked language modelling, 2,000 steps of 16
             rows of 128 tokens, AdamW 1e-3 after 100 steps of warm-up, falling on a line to 0, betas 0.9/0.999, weight decay
             0.01, gradients clipped to 1, dropout 0.1, fp32.

Usage: learning_pytorch.py RECIPE DATA --results FOLDER [--python INTERPRETER] [--seeds 1,2,3] [--side ours|theirs|both]
       [--build DIR]
With --side none only the table is printed. Ends with status 1 where a run is missing, where one of either side gets fewer than
60 % of the pictures right (resnet18) or a loss above 5.8 (bert-mini; the frequencies of words alone give 6.27), or where the
weights on bytes are more than one percentage point less accurate than in f32.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import common

OURS = {
    "resnet18": "--model resnet18 --data images:{data} --image-size 32 --batch-size 128 --steps 624 --optimizer sgd --lr 0.05"
    " --momentum 0.9 --nesterov --weight-decay 5e-4 --clip-norm 0 --label-smoothing 0.1 --schedule cosine --warmup 80"
    " --precision bf16 --compile",
    "bert-mini": "--model bert-mini --data mlm:{data} --tokenizer {data}/vocab.txt --seq-len 128 --batch-size 16 --steps 2000"
    " --optimizer adamw --lr 1e-3 --betas 0.9,0.999 --schedule linear --warmup 100 --weight-decay 0.01 --clip-norm 1"
    " --compile",
}
THEIRS = {
    "resnet18": "learn_resnet.py {data} --batch 128 --ranks 2 --steps 624 --lr 0.05 --warmup 80 --weight-decay 5e-4"
    " --label-smoothing 0.1 --precision bf16",
    "bert-mini": "learn_bert.py {data}/train.txt {data}/validation.txt {data}/vocab.txt --length 128 --batch 16 --steps 2000"
    " --lr 1e-3 --warmup 100 --weight-decay 0.01",
}

LIMITS = {"resnet18": ("val_accuracy", 0.6), "bert-mini": ("val_loss", 5.8)}
POINTS_ON_BYTES = 1

ON_BYTES = {"resnet18": "int8 --model resnet18 --data images:{data} --samples 1"}
INITIAL = {"bert-mini": "--model bert-mini --data mlm:{data} --tokenizer {data}/vocab.txt --seq-len 128 --steps 0"}


def last_json(path):
    """The last line of a file as an object; None where the run has not ended."""
    lines = path.read_text().splitlines() if path.is_file() else []
    try:
        end = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return None
    return end if "val_loss" in end and "seconds" in end else None


def steps_of(recipe):
    words = OURS[recipe].split()
    return int(words[words.index("--steps") + 1])


def run(command, log):
    with log.open("w") as out:
        if subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode != 0:
            sys.exit(f"{' '.join(command)}\nfailed; see {log}")


def run_ours(options, seed, to):
    command = [common.program(options, "tlaunch"), "--nproc", "2", common.program(options, "train")]
    command += OURS[options.recipe].format(data=options.data).split()
    command += ["--save", str(to.with_suffix(".safetensors"))] if options.recipe in ON_BYTES else []
    run([*command, "--seed", seed, "--metrics", str(to)], to.with_suffix(".log"))


def run_on_bytes(options, seed, to):
    """What the weights of our run get right in f32, and on bytes; the training part calibrates."""
    weights = options.results / f"{options.recipe}_ours_{seed}.safetensors"
    command = [common.program(options, "bench"), *ON_BYTES[options.recipe].format(data=options.data).split()]
    part = to.with_suffix(".part")
    run([*command, "--weights", str(weights), "--json", str(part)], to.with_suffix(".log"))
    part.rename(to)


def initial_weights(options, seed):
    """A folder with the values that our run of this seed begins with, as Hugging Face has them."""
    folder = options.results / f"{options.recipe}_weights_{seed}"
    if not (folder / "model.safetensors").is_file():
        command = [common.program(options, "train"), *INITIAL[options.recipe].format(data=options.data).split()]
        run([*command, "--seed", seed, "--save", f"{folder}/"], folder.with_suffix(".log"))
    return folder


def run_theirs(options, seed, to):
    script, *flags = THEIRS[options.recipe].format(data=options.data).split()
    flags += ["--weights", str(initial_weights(options, seed))] if options.recipe in INITIAL else []
    run([options.python, str(common.ROOT / "scripts/reference" / script), *flags, "--seed", seed], to)


def missed(recipe, sides, seeds, ends, on_bytes):
    """What falls short, in words; `ends` and `on_bytes` are by (side, seed) and by seed."""
    key, limit = LIMITS[recipe]
    for side, seed in ((side, seed) for side in sides for seed in seeds):
        end = ends.get((side, seed))
        if end is None:
            yield f"{side}, seed {seed}: missing"
        elif not (end[key] >= limit if key == "val_accuracy" else end[key] <= limit):
            yield f"{side}, seed {seed}: {key} {end[key]:.3f}, limit {limit}"
    for seed, e in on_bytes.items():
        if not e["int8"] >= e["fp32"] - POINTS_ON_BYTES:
            yield f"seed {seed}: on bytes {e['int8']:.1f} %, in f32 {e['fp32']:.1f} %"


def cell(values, form):
    """The values of the seeds, and their mean and standard deviation."""
    if not values:
        return "missing"
    each = ", ".join(form.format(v) for v in values)
    if len(values) == 1:
        return each
    return f"{each}: {form.format(statistics.mean(values))} ± {form.format(statistics.stdev(values))}"


def main():
    p = common.parser(__doc__)
    p.add_argument("recipe", choices=OURS)
    p.add_argument("data", type=Path)
    p.add_argument("--results", type=Path, required=True)
    p.add_argument("--python", default=sys.executable)
    p.add_argument("--seeds", default="1,2,3")
    p.add_argument("--side", choices=("ours", "theirs", "both", "none"), default="both")
    options = p.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    sides = {"ours": (run_ours, "jsonl"), "theirs": (run_theirs, "txt")}
    ends, on_bytes, seeds = {}, {}, options.seeds.split(",")
    for seed in seeds:
        for side, (take, suffix) in sides.items():
            path = options.results / f"{options.recipe}_{side}_{seed}.{suffix}"
            if last_json(path) is None and options.side in (side, "both"):
                take(options, seed, path)
            if (end := last_json(path)) is not None:
                if end["steps"] != steps_of(options.recipe):
                    sys.exit(f"{path} is of {end['steps']} steps, not {steps_of(options.recipe)}; give another --results")
                ends[side, seed] = end
        if options.recipe in ON_BYTES:
            path = options.results / f"{options.recipe}_on_bytes_{seed}.json"
            if not path.is_file() and options.side in ("ours", "both"):
                run_on_bytes(options, seed, path)
            if path.is_file():
                on_bytes[seed] = json.loads(path.read_text())["result"]["accuracy"]
    print("| | accuracy, % | loss |\n|---|---|---|")
    for side, name in (("ours", "Tessera, 2 ranks"), ("theirs", "PyTorch")):
        of_side = [ends[side, seed] for seed in seeds if (side, seed) in ends]
        shares = [e.get("val_accuracy") for e in of_side]
        accuracy = "" if None in shares else cell([100 * share for share in shares], "{:.1f}")
        print(f"| {name} | {accuracy} | {cell([e['val_loss'] for e in of_side], '{:.3f}')} |")
    if on_bytes:
        print(f"| Tessera's weights, on bytes | {cell([e['int8'] for e in on_bytes.values()], '{:.1f}')} | |")
    judged = [side for side in sides if options.side in (side, "both", "none")]
    beyond = list(missed(options.recipe, judged, seeds, ends, on_bytes))
    for line in beyond:
        print(f"learning_pytorch.py: {line}")
    sys.exit(bool(beyond))


if __name__ == "__main__":
    main()
