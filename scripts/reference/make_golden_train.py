"""Writes tests/golden/train/: small runs of `train` as PyTorch makes them, and the files that `train` reads for them.

How: a GPT and a ResNet start from weights that are stored beside the results, and learn from rows that this script draws as
core/data does (windows by Philox, images by a Feistel permutation), in fp64, so that what a run of fp32 differs by is its
own rounding. Rates come from the formulas written here, optimizers from torch.optim, Lion from its paper. Every recipe is
run again without each of its flags: what a flag changes must be many times the tolerance of the test that compares.

  gpt.safetensors, resnet.safetensors   weights before the first step, as `--weights` reads them
  tokens.bin                            u16 tokens; the last tenth validates
  images/                               IDX files of 12 images to train on and 5 to validate
  recipes.json                          {"metadata", "tolerance": {precision: {"loss", "norm"}}, "recipes": [{"name", "flags",
                                        "precision", "lr", "loss", "grad_norm" (before clipping), "val_loss", and in
                                        16 bits "fp32_loss", of the same run in fp32}]}

Usage: make_golden_train.py [--out DIR]
"""

import argparse
import json
import math
import pathlib
import struct

import numpy as np
import torch
from torch.nn import functional as F

import safetensors_io
from gpt import GPT, GPTConfig
from make_golden_resnet import bits, fill
from masked_draws import SHUFFLE, WINDOW, philox, uniform_below
from resnet import ResNet

CONFIG = GPTConfig(layers=2, heads=2, dim=16, vocab=23, context=8, bias=True)
GPT_FLAGS = "--model gpt-nano --set layers=2 --set heads=2 --set dim=16 --set context=8 --set bias=true --data tokens:tokens.bin"
RESNET_FLAGS = "--model resnet18 --set width=2 --set small_images=true --data idx:images --image-size 8"
SIDE, CLASSES, TRAIN_IMAGES = 8, 4, 12
MEAN, DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
# Relative, of a loss and of a norm: three times or more what PyTorch's own runs in that precision differ by from fp64. fp32:
# tens of roundings of 2^-24 stand in a row between weights and loss, and steps hand them on; batch-norm over few values
# divides by small deviations. 16 bits: operands are rounded (2^-9, 2^-12), and frameworks round different ones.
TOLERANCE = {
    "fp32": {"loss": 1e-6, "norm": 1e-5},
    "fp32 images": {"loss": 6e-5, "norm": 6e-4},
    "bf16": {"loss": 4e-3, "norm": 4e-2},
    "fp16": {"loss": 5e-4, "norm": 5e-3},
}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
MARGIN = 5  # times the tolerance: what each flag must change at least

# What `train --help` says of a run without flags.
DEFAULTS = {
    "batch-size": 12, "accumulate": 1, "steps": 6, "epochs": 0, "optimizer": "adamw", "lr": 1e-3, "min-lr": 0.0, "betas": "0.9,0.99",
    "momentum": 0.9, "nesterov": False, "label-smoothing": 0.0, "schedule": "constant", "warmup": 0, "weight-decay": None,
    "clip-norm": 1.0, "seed": 1337, "precision": "fp32",
}  # fmt: skip
FAST = {"lr": 0.02, "batch-size": 4}
SLOW = {"model": "resnet", "optimizer": "sgd", "lr": 5e-4, "batch-size": 6}
RECIPES = {
    "plain": {"lr": 0.01},
    "constant with warm-up": {**FAST, "warmup": 3},
    "linear": {**FAST, "schedule": "linear"},
    "linear with a least rate": {**FAST, "schedule": "linear", "min-lr": 0.01},
    "linear with warm-up": {**FAST, "schedule": "linear", "warmup": 2},
    "linear with both": {**FAST, "schedule": "linear", "warmup": 2, "min-lr": 0.005},
    "cosine": {**FAST, "schedule": "cosine"},
    "cosine with a least rate": {**FAST, "schedule": "cosine", "min-lr": 0.01},
    "cosine with warm-up": {**FAST, "schedule": "cosine", "warmup": 3},
    "cosine with both": {**FAST, "schedule": "cosine", "warmup": 3, "min-lr": 0.005, "steps": 8},
    "betas": {**FAST, "betas": "0.6,0.7"},
    "decay": {**FAST, "weight-decay": 5.0},
    "no decay": {**FAST, "weight-decay": 0.0},
    "clipping": {**FAST, "clip-norm": 0.5, "optimizer": "sgd", "lr": 0.5},
    "no clipping": {**FAST, "clip-norm": 0.0, "optimizer": "sgd", "lr": 0.5},
    "some steps clipped": {**FAST, "clip-norm": 1.2, "optimizer": "sgd", "lr": 0.5},
    "accumulation": {**FAST, "accumulate": 2, "clip-norm": 0.7, "optimizer": "sgd", "lr": 0.5},
    "seed": {**FAST, "seed": 7},
    "momentum": {**FAST, "optimizer": "sgd", "lr": 0.2, "momentum": 0.5},
    "no momentum": {**FAST, "optimizer": "sgd", "lr": 0.2, "momentum": 0.0},
    "nesterov": {**FAST, "optimizer": "sgd", "lr": 0.2, "nesterov": True},
    "sgd with decay": {**FAST, "optimizer": "sgd", "lr": 0.2, "weight-decay": 0.1},
    "rmsprop": {**FAST, "optimizer": "rmsprop", "lr": 0.003, "weight-decay": 0.1},
    "adagrad": {**FAST, "optimizer": "adagrad", "lr": 0.01, "weight-decay": 0.1},
    "lion": {**FAST, "optimizer": "lion", "lr": 0.002, "betas": "0.7,0.8", "weight-decay": 5.0},
    "epochs": {**FAST, "epochs": 0.1, "schedule": "linear"},
    "bf16": {**FAST, "precision": "bf16", "optimizer": "sgd", "lr": 0.05, "momentum": 0.0},
    "fp16": {**FAST, "precision": "fp16", "optimizer": "sgd", "lr": 0.05, "momentum": 0.0},
    "images": {**SLOW, "clip-norm": 0.0},
    "label smoothing": {**SLOW, "label-smoothing": 0.2},
    "accumulated images": {**SLOW, "batch-size": 12, "accumulate": 2, "clip-norm": 2.0},
    "epochs of images": {**SLOW, "epochs": 2.5, "schedule": "linear"},
    "images of another seed": {**SLOW, "seed": 3},
    "recipe of a ResNet": {
        **SLOW, "nesterov": True, "weight-decay": 0.5, "clip-norm": 0.0, "label-smoothing": 0.1, "schedule": "cosine",
        "warmup": 2, "min-lr": 1e-4,
    },
}  # fmt: skip


def rate(r, step):
    """Of step `step` from 0: a rise over `warmup` steps, then from lr to min-lr, where step `steps` would be."""
    lr, low, warmup, steps = r["lr"], r["min-lr"], r["warmup"], r["steps"]
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / (steps - warmup)
    if r["schedule"] == "linear":
        return lr + (low - lr) * done
    if r["schedule"] == "cosine":
        return low + (lr - low) * (1 + math.cos(math.pi * done)) / 2
    return lr


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(b1 * m + (1 - b1) * p.grad) + group["weight_decay"] * p
                self.state[p]["m"] = b2 * m + (1 - b2) * p.grad
                p.sub_(lr * update)


def make_optimizer(r, model):
    kind, parameters = r["optimizer"], list(model.parameters())
    decay = r["weight-decay"]
    if decay is None:
        decay = 0.1 if kind in ("adamw", "lion") else 0.0
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": decay if r.get("decay of all") else 0.0},
    ]
    betas = tuple(map(float, r["betas"].split(",")))
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=r["lr"], momentum=r["momentum"], nesterov=r["nesterov"])
    if kind == "rmsprop":
        return torch.optim.RMSprop(groups, lr=r["lr"])
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=r["lr"])
    if kind == "lion":
        return Lion(groups, r["lr"], betas)
    return torch.optim.AdamW(groups, lr=r["lr"], betas=betas, eps=1e-8)


def permuted(i, n, seed, epoch):
    """Which item stands at place `i` of pass `epoch` over n items: core/data/permutation.h."""
    half = ((n - 1).bit_length() + 1) // 2
    below, x = (1 << half) - 1, i
    while True:
        left, right = x >> half, x & below
        for turn in range(8):
            high = int(SHUFFLE) | epoch << 8 | turn
            left, right = right, left ^ (int(philox(np.uint64(seed), np.uint64(high), np.uint64(right))) & below)
        x = left << half | right
        if x < n:
            return x


class Text:
    """Windows of the tokens, and the GPT."""

    def __init__(self, tokens):
        cut = len(tokens) * 9 // 10
        self.train, self.rest = tokens[:cut], tokens[cut:]

    def items(self):
        return (len(self.train) - 1) // CONFIG.context

    def rows(self, numbers, seed):
        T = CONFIG.context
        begin = uniform_below(len(self.train) - T, seed, WINDOW, np.asarray(numbers, np.uint64))
        return self.cut(self.train, begin)

    def cut(self, tokens, begin):
        rows = torch.from_numpy(tokens[begin[:, None] + np.arange(CONFIG.context + 1)].astype(np.int64))
        return rows[:, :-1], rows[:, 1:]

    def validation(self):
        T = CONFIG.context
        return self.cut(self.rest, np.arange((len(self.rest) - 1) // T) * T)

    def model(self, init):
        model = GPT(CONFIG).double()
        model.load_state_dict(init)
        return model

    def loss(self, model, x, targets, smoothing=0.0):
        return F.cross_entropy(model(x).flatten(0, 1), targets.flatten(), label_smoothing=smoothing)


class Images:
    """Normalised grey images, and the ResNet."""

    def __init__(self, train, train_labels, test, test_labels):
        self.train, self.train_labels = self.normalised(train), torch.from_numpy(train_labels.astype(np.int64))
        self.test, self.test_labels = self.normalised(test), torch.from_numpy(test_labels.astype(np.int64))

    def normalised(self, pixels):
        grey = torch.from_numpy(pixels.astype(np.float64))[:, None].expand(-1, 3, -1, -1) / 255
        return (grey - MEAN.double()[:, None, None]) / DEVIATION.double()[:, None, None]

    def items(self):
        return len(self.train)

    def rows(self, numbers, seed):
        n = len(self.train)
        items = [permuted(k % n, n, seed, k // n) for k in numbers]
        return self.train[items], self.train_labels[items]

    def validation(self):
        return self.test, self.test_labels

    def model(self, init):
        model = ResNet(depth=18, classes=CLASSES, width=2, small_images=True).double()
        model.load_state_dict(init)
        return model

    def loss(self, model, x, targets, smoothing=0.0):
        return F.cross_entropy(model(x), targets, label_smoothing=smoothing)


class Statistics:
    """Running statistics of a step: the mean of those that each micro-batch alone would leave."""

    def __init__(self, model):
        self.buffers = [b for b in model.buffers() if b.is_floating_point() and b.dim() == 1]
        self.begin, self.left = [b.clone() for b in self.buffers], []

    def begin_micro_batch(self):
        self.keep()
        for b, begin in zip(self.buffers, self.begin):
            b.copy_(begin)
        self.started = True

    def keep(self):
        if getattr(self, "started", False):
            self.left.append([b.clone() for b in self.buffers])

    def end_step(self):
        self.keep()
        for b, *values in zip(self.buffers, *self.left):
            b.copy_(sum(values) / len(values))


def run(r, task, init, single=False):
    """The run's rates, losses, norms and the loss of validation."""
    low = r["precision"] in LOW
    autocast = {"device_type": "cpu", "dtype": LOW.get(r["precision"]), "enabled": low}
    model = task.model(init)
    if low or single:
        model.float()
    optimizer = make_optimizer(r, model)
    rows = r["batch-size"] // r["accumulate"]
    out = {"lr": [], "loss": [], "grad_norm": []}
    for step in range(r["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = rate(r, step)
        optimizer.zero_grad()
        losses, statistics = [], Statistics(model)
        for k in range(r["accumulate"]):
            first = step * r["batch-size"] + k * rows
            x, targets = task.rows(range(first, first + rows), r["seed"])
            x = x.float() if single and x.is_floating_point() else x
            statistics.begin_micro_batch()
            with torch.autocast(**autocast):
                loss = task.loss(model, x, targets, r["label-smoothing"])
            (loss / r["accumulate"]).backward()
            losses.append(loss.item())
        limit = r["clip-norm"] or math.inf
        statistics.end_step()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        out["lr"].append(rate(r, step))
        out["loss"].append(sum(losses) / len(losses))
        out["grad_norm"].append(norm.item())
    model.eval()
    with torch.no_grad(), torch.autocast(**autocast):
        x, targets = task.validation()
        out["val_loss"] = task.loss(model, x.float() if single and x.is_floating_point() else x, targets).item()
    return out


def difference(a, b, tolerance):
    """The largest relative difference of two runs, over its tolerance; another length is infinite."""
    if len(a["loss"]) != len(b["loss"]):
        return math.inf
    pairs = [(x, y, tolerance["loss"]) for x, y in zip(a["loss"] + [a["val_loss"]], b["loss"] + [b["val_loss"]])]
    pairs += [(x, y, tolerance["norm"]) for x, y in zip(a["grad_norm"], b["grad_norm"])]
    return max(abs(x - y) / abs(y) / t for x, y, t in pairs)


def flags_of(recipe):
    words = [RESNET_FLAGS if recipe.get("model") else GPT_FLAGS]
    for flag, value in recipe.items():
        if flag != "model":
            words.append(f"--{flag}" if value is True else f"--{flag} {value}")
    return " ".join(words + ([] if "steps" in recipe or "epochs" in recipe else [f"--steps {DEFAULTS['steps']}"]))


def golden(recipe, tasks):
    """The recipe's record; raises where a flag could be ignored without a difference."""
    task, init = tasks[recipe.get("model", "gpt")]
    full = {**DEFAULTS, **recipe}
    if full["epochs"]:
        full["steps"] = int(full["epochs"] * task.items() / full["batch-size"])
    precision = full["precision"] + (" images" if recipe.get("model") else "")
    tolerance = TOLERANCE[precision]
    out = run(full, task, init)
    changed, record = {}, {"flags": flags_of(recipe), "precision": precision, **out}
    own = difference(run(full, task, init, single=True), out, tolerance)
    if own > 1 / 3:
        raise SystemExit(f"{recipe}: PyTorch's own run in {precision} differs by {own:.3g} tolerances")
    for flag in recipe:
        if flag in ("model", "steps", "epochs", "batch-size") or (flag == "accumulate" and task is tasks["gpt"][0]):
            continue  # micro-batches of one size have the mean of the whole batch
        without = {**full, flag: DEFAULTS[flag]}
        if flag == "precision":  # rounding hides in the tolerance; what is far from fp32 by fp32's did not ignore the flag
            record["fp32_loss"] = run(without, task, init)["loss"]
            changed["--precision"] = difference({**out, "loss": record["fp32_loss"]}, out, TOLERANCE["fp32"])
            continue
        if flag == "optimizer":
            without["nesterov"] = False
        changed[f"--{flag}"] = difference(run(without, task, init), out, tolerance)
    if recipe.get("weight-decay"):
        changed["the group that does not decay"] = difference(run({**full, "decay of all": True}, task, init), out, tolerance)
    return record, changed


def gpt_weights(model):
    """As Tessera names and orders them: rows of c_attn are [heads, 3, width of a head]."""
    out = {}
    for name, p in model.named_parameters():
        if ".c_attn." in name:
            shape = (3, CONFIG.heads, CONFIG.dim // CONFIG.heads, *p.shape[1:])
            p = p.reshape(shape).transpose(0, 1).reshape(p.shape)
        out[name] = p.detach().float().contiguous()
    return out


def write_idx(path, values):
    with open(path, "wb") as file:
        file.write(struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape))
        file.write(values.tobytes())


def make_tasks(out):
    """Draws weights and data, writes them; name -> (task, weights in fp64 as they were stored)."""
    torch.manual_seed(1337)
    gpt = GPT(CONFIG).double()
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)  # so that biases and norms have something to lose
    gpt.float()
    safetensors_io.save(out / "gpt.safetensors", gpt_weights(gpt), {"made_by": "scripts/reference/make_golden_train.py"})
    resnet = ResNet(depth=18, classes=CLASSES, width=2, small_images=True).double()
    fill(resnet)
    resnet.float()
    state = dict(resnet.state_dict())
    safetensors_io.save(out / "resnet.safetensors", state, {"made_by": "scripts/reference/make_golden_train.py"})

    # Tokens that follow each other by a rule with exceptions: something to learn in a few steps.
    noise = bits(2000, 11)
    tokens = np.zeros(2000, np.int64)
    for i in range(1, 2000):
        tokens[i] = (tokens[i - 1] * 5 + 3) % CONFIG.vocab if noise[i] % 4 else int(noise[i] >> np.uint64(8)) % CONFIG.vocab
    assert tokens.max() == CONFIG.vocab - 1
    tokens.astype("<u2").tofile(out / "tokens.bin")

    pixels = (bits((TRAIN_IMAGES + 5) * SIDE * SIDE, 12) >> np.uint64(56)).astype(np.uint8).reshape(-1, SIDE, SIDE)
    labels = (np.arange(TRAIN_IMAGES + 5) % CLASSES).astype(np.uint8)
    (out / "images").mkdir(exist_ok=True)
    for split, part in (("train", slice(0, TRAIN_IMAGES)), ("t10k", slice(TRAIN_IMAGES, None))):
        write_idx(out / "images" / f"{split}-images-idx3-ubyte", pixels[part])
        write_idx(out / "images" / f"{split}-labels-idx1-ubyte", labels[part])

    n = TRAIN_IMAGES
    images = Images(pixels[:n], labels[:n], pixels[n:], labels[n:])
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in state.items()}
    return {
        "gpt": (Text(tokens), {name: t.double() for name, t in gpt.state_dict().items()}),
        "resnet": (images, doubled),
    }


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=root / "tests" / "golden" / "train")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    tasks, records, weak = make_tasks(out), [], []
    for name, recipe in RECIPES.items():
        record, changed = golden(recipe, tasks)
        records.append({"name": name, **record})
        print(f"{name}: " + ", ".join(f"without {flag} {times:.3g} tolerances" for flag, times in changed.items()))
        weak += [f"{name}: {flag}" for flag, times in changed.items() if times < MARGIN]
    if weak:
        raise SystemExit("ignoring these would not be noticed: " + "; ".join(weak))
    metadata = {"made_by": "scripts/reference/make_golden_train.py", "torch": torch.__version__}
    document = {"metadata": metadata, "tolerance": TOLERANCE, "recipes": records}
    (out / "recipes.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
