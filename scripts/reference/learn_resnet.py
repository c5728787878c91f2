"""Trains a ResNet on an archive of class folders with PyTorch and prints loss and accuracy over its test images.

How: the recipe that Tessera's `train --model resnet18` is compared with in scripts/measure/learning_pytorch.py. SGD with
Nesterov momentum 0.9, weight decay on weights of two dims and more, label smoothing in the training loss, learning rate
with linear warm-up and a cosine to 0 at the last step. Images are padded by an eighth of their side, cut out at random
and mirrored at random; every epoch is a new permutation, without the images that fill no batch. Convolutions start from
a normal distribution with variance 2 / fan_out. A batch goes through the model in `--ranks` parts, each normalised by
its own statistics, as data-parallel ranks do it. Statistics for the test follow the parts one by one.

Usage: learn_resnet.py ARCHIVE [--depth N] [--steps N] [--batch N] [--ranks N] [--lr F] [--warmup N] [--weight-decay F]
       [--label-smoothing F] [--precision fp32|bf16] [--seed N] [--threads N]
Needs Pillow. Prints a line every 20 steps, then one JSON object: {torch, seed, steps, val_loss, val_accuracy, seconds}.
"""

import argparse
import contextlib
import io
import json
import math
import tarfile
import time

import numpy
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from resnet import ResNet

MEAN = torch.tensor([0.485, 0.456, 0.406])
DEVIATION = torch.tensor([0.229, 0.224, 0.225])


def read_split(path, split):
    """Returns (images u8 [N, 3, H, W], labels i64 [N]) of prefix/split/class/name.jpg; labels number sorted classes."""
    images, names = [], []
    with tarfile.open(path) as archive:
        for member in archive:
            parts = member.name.split("/")
            if not member.isfile() or len(parts) < 3 or parts[-3] != split:
                continue
            with Image.open(io.BytesIO(archive.extractfile(member).read())) as image:
                images.append(torch.from_numpy(numpy.array(image.convert("RGB"))))
            names.append(parts[-2])
    classes = sorted(set(names))
    labels = torch.tensor([classes.index(name) for name in names])
    return torch.stack(images).permute(0, 3, 1, 2).contiguous(), labels, len(classes)


def normalised(images):
    x = (images.float() / 255 - MEAN.view(3, 1, 1)) / DEVIATION.view(3, 1, 1)
    return x.contiguous(memory_format=torch.channels_last)


def augmented(images):
    """Crops of black-padded images, half of them mirrored."""
    side = images.shape[-1]
    padding = side // 8
    padded = F.pad(images, (padding,) * 4)
    out = torch.empty_like(images)
    places = torch.randint(2 * padding + 1, (len(images), 2)).tolist()
    mirrored = torch.rand(len(images)) < 0.5
    for i, (top, left) in enumerate(places):
        cut = padded[i, :, top : top + side, left : left + side]
        out[i] = cut.flip(-1) if mirrored[i] else cut
    return out


def initialise(model):
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def learning_rate(step, options):
    if step < options.warmup:
        return options.lr * (step + 1) / (options.warmup + 1)
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return 0.5 * (1 + math.cos(math.pi * progress)) * options.lr


def batches(count, size):
    while True:
        order = torch.randperm(count)
        for at in range(0, count - size + 1, size):
            yield order[at : at + size]


@torch.no_grad()
def evaluate(model, images, labels, precision):
    model.eval()
    loss = right = 0.0
    for x, y in zip(images.split(64), labels.split(64)):
        with precision():
            logits = model(normalised(x)).float()
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        right += (logits.argmax(1) == y).sum().item()
    return loss / len(labels), right / len(labels)


def main():
    parser = argparse.ArgumentParser(description="Trains a residual network with PyTorch.")
    parser.add_argument("archive")
    parser.add_argument("--depth", type=int, default=18)
    parser.add_argument("--steps", type=int, default=312)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    def precision():
        return torch.autocast("cpu", torch.bfloat16) if options.precision == "bf16" else contextlib.nullcontext()

    images, labels, classes = read_split(options.archive, "train")
    model = ResNet(options.depth, classes, small_images=images.shape[-1] <= 64)
    initialise(model)
    model = model.to(memory_format=torch.channels_last)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=options.lr, momentum=0.9, nesterov=True)
    source = batches(len(labels), options.batch)
    begin = time.perf_counter()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        chosen = next(source)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in chosen.chunk(options.ranks):
            with precision():
                logits = model(normalised(augmented(images[part])))
            loss = F.cross_entropy(logits.float(), labels[part], label_smoothing=options.label_smoothing)
            (loss / options.ranks).backward()
            total += loss.item() / options.ranks
        optimizer.step()
        if step % 20 == 0 or step + 1 == options.steps:
            print(f"step {step + 1} loss {total:.4f} {(time.perf_counter() - begin) / (step + 1):.3f} s/step", flush=True)
    seconds = time.perf_counter() - begin
    loss, accuracy = evaluate(model, *read_split(options.archive, "test")[:2], precision)
    result = {"torch": torch.__version__, "seed": options.seed, "steps": options.steps}
    result |= {"val_loss": loss, "val_accuracy": accuracy, "seconds": seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
