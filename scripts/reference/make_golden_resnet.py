"""Writes tests/golden/resnet.json: loss, logits and gradients of small residual networks in fp64, training mode.

Weights, images and targets are not stored: both sides make them from a counter (splitmix64, as sample_values of
core/ops/samples.h has it). Key 1: images in [-1, 1); key 2: targets; key 100 + i: parameter number i, in [-b, b) with
b = sqrt(6 / fan_in) for weights of two and more dims, in [0.5, 1.5) for other weights, in [-0.2, 0.2) for biases. Of
each gradient and running statistic two numbers are stored: its norm, and its dot product with values in [-1, 1) of key
5000 + i (buffers: 9000 + i).

{"metadata", "cases": [{"name", "options", "images": [B, 3, H, W], "loss", "eval_loss" (after that step's statistics),
"logits": [B][classes], "gradients": {name: [norm, dot]}, "buffers": {name: [norm, dot]}}]}

Usage: make_golden_resnet.py [--out DIR]
"""

import argparse
import json
import math
import pathlib

import numpy as np
import torch

from resnet import ResNet

CASES = {
    "resnet18_small": ({"depth": 18, "classes": 10, "width": 4, "small_images": True}, [3, 3, 16, 16]),
    "resnet34": ({"depth": 34, "classes": 7, "width": 4, "small_images": False}, [2, 3, 64, 64]),
    "resnet50": ({"depth": 50, "classes": 10, "width": 4, "small_images": False}, [2, 3, 64, 64]),
}


def bits(count, key):
    with np.errstate(over="ignore"):
        x = np.uint64(key * 1000003) + np.arange(count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def values(shape, low, high, key):
    unit = (bits(math.prod(shape), key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(low + (high - low) * unit).reshape(shape)


def fill(model):
    for i, (name, p) in enumerate(model.named_parameters()):
        bound = math.sqrt(6 / (p.numel() / p.shape[0])) if p.ndim > 1 else 0.2
        low, high = (0.5, 1.5) if p.ndim == 1 and name.endswith("weight") else (-bound, bound)
        p.data = values(p.shape, low, high, 100 + i)


def digest(t, key):
    t = t.detach().double()
    return [t.norm().item(), (t * values(t.shape, -1, 1, key)).sum().item()]


def run(name, options, shape):
    model = ResNet(**options).double()
    fill(model)
    x = values(shape, -1, 1, 1)
    targets = torch.from_numpy((bits(shape[0], 2) % np.uint64(options["classes"])).astype(np.int64))
    logits = model(x)
    loss = torch.nn.functional.cross_entropy(logits, targets)
    loss.backward()
    with torch.no_grad():
        eval_loss = torch.nn.functional.cross_entropy(model.eval()(x), targets)
    return {
        "name": name,
        "options": options,
        "images": shape,
        "loss": loss.item(),
        "eval_loss": eval_loss.item(),
        "logits": logits.tolist(),
        "gradients": {n: digest(p.grad, 5000 + i) for i, (n, p) in enumerate(model.named_parameters())},
        "buffers": {n: digest(b, 9000 + i) for i, (n, b) in enumerate(model.named_buffers())},
    }


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description="Writes the golden run of residual networks.")
    parser.add_argument("--out", type=pathlib.Path, default=root / "tests" / "golden")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    metadata = {"made_by": "scripts/reference/make_golden_resnet.py", "torch": torch.__version__}
    cases = [run(name, *case) for name, case in CASES.items()]
    (out / "resnet.json").write_text(json.dumps({"metadata": metadata, "cases": cases}, indent=0) + "\n")


if __name__ == "__main__":
    main()
