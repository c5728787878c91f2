"""Cases of convolutional networks: convolutions and their transposes, pooling, normalisation over batches and groups.

HELPERS are the functions that the calls use besides PyTorch's own.
"""

import torch
from torch.nn import functional as F

from golden_cases import f64, normal, uniform


def batch_norm(x, mean, var, weight=None, bias=None, **options):
    """The result, and the running statistics after it."""
    mean, var = mean.clone(), var.clone()
    y = F.batch_norm(x, mean, var, weight, bias, **options)
    return y, mean, var


HELPERS = {"batch_norm": batch_norm}


def convolutions(r):
    def add(name, x, weight, bias=True, **options):
        listed = "".join(f", {key}={key}" for key in options)
        inputs = {"x": normal(*x), "weight": normal(*weight)}
        if bias:
            inputs["bias"] = normal(weight[0])
        call = f"F.{name.split('/')[0]}(x, weight{', bias' if bias else ', None'}{listed})"
        r.add(name, call, inputs, options, grads=" ".join(inputs))

    add("conv1d/plain", (2, 3, 7), (4, 3, 3))
    add("conv1d/options", (2, 4, 9), (6, 2, 3), stride=2, padding=2, dilation=2, groups=2)
    add("conv1d/same", (1, 2, 6), (3, 2, 4), bias=False, padding="same")
    add("conv2d/plain", (2, 3, 6, 5), (4, 3, 3, 3))
    add("conv2d/no_bias", (1, 2, 4, 4), (2, 2, 1, 1), bias=False)
    add("conv2d/padding", (2, 3, 5, 6), (4, 3, 3, 2), padding=[1, 2])
    add("conv2d/stride", (1, 3, 9, 8), (4, 3, 3, 3), stride=[2, 3], padding=1)
    add("conv2d/dilation", (1, 2, 9, 8), (3, 2, 3, 2), dilation=[2, 3])
    add("conv2d/groups", (2, 6, 5, 5), (4, 3, 3, 3), padding=1, groups=2)
    add("conv2d/depthwise", (2, 4, 6, 6), (8, 1, 3, 3), stride=2, padding=1, groups=4)
    add("conv2d/same", (1, 2, 5, 6), (3, 2, 4, 3), padding="same", dilation=[1, 2])
    add("conv2d/valid", (1, 2, 5, 6), (3, 2, 4, 3), padding="valid")
    add("conv2d/no_batch", (3, 6, 5), (2, 3, 3, 3), padding=1)
    add("conv2d/unreached", (1, 2, 8, 8), (2, 2, 3, 3), bias=False, stride=3)
    add("conv3d/plain", (1, 2, 4, 5, 4), (3, 2, 2, 3, 2))
    add("conv3d/options", (2, 2, 5, 4, 6), (4, 1, 3, 2, 3), stride=[2, 1, 2], padding=[1, 0, 2], groups=2)


def transposes(r):
    def add(name, x, weight, groups=1, **options):
        if groups > 1:
            options["groups"] = groups
        listed = "".join(f", {key}={key}" for key in options)
        inputs = {"x": normal(*x), "weight": normal(*weight), "bias": normal(weight[1] * groups)}
        r.add(
            name,
            f"F.{name.split('/')[0]}(x, weight, bias{listed})",
            inputs,
            options,
            grads="x weight bias",
        )

    add("conv_transpose1d/options", (2, 3, 5), (3, 2, 4), stride=3, padding=1, output_padding=2)
    add("conv_transpose2d/plain", (2, 3, 4, 3), (3, 2, 3, 2))
    add("conv_transpose2d/stride", (1, 3, 4, 5), (3, 2, 3, 3), stride=2, padding=1, output_padding=1)
    add("conv_transpose2d/groups", (1, 4, 3, 4), (4, 3, 2, 3), groups=2, stride=[1, 2])
    add("conv_transpose2d/dilation", (1, 2, 4, 4), (2, 2, 3, 2), dilation=[3, 1], output_padding=[2, 0])
    add("conv_transpose3d/plain", (1, 2, 3, 2, 3), (2, 2, 2, 3, 2), stride=2)


def pools(r):
    def add(name, x, kernel, spatial, **options):
        listed = "".join(f", {key}={key}" for key in options)
        call = f"F.{name.split('/')[0]}(x, kernel{listed})"
        r.add(name, call, {"x": normal(*x)}, {"kernel": kernel, **options}, grads="x")

    add("max_pool1d/options", (2, 3, 9), 3, 1, stride=2, padding=1, dilation=2)
    add("max_pool2d/plain", (2, 3, 6, 7), 2, 2)
    add("max_pool2d/resnet", (1, 4, 8, 8), 3, 2, stride=2, padding=1)
    add("max_pool2d/ceil", (1, 2, 7, 6), [3, 2], 2, stride=[2, 3], padding=[1, 0], ceil_mode=True)
    add("max_pool2d/no_batch", (3, 5, 5), [2, 3], 2, stride=1)
    add("max_pool3d/plain", (1, 2, 4, 4, 5), 2, 3)
    r.add(
        "max_pool2d/nan_and_ties",
        "F.max_pool2d(x, kernel, stride=stride)",
        {"x": f64([[[[1, 1, 0, float("nan")], [1, 0, 2, 2], [-1, -1, 5, 4], [-1, -1, 4, 5]]]])},
        {"kernel": 2, "stride": 1},
        grads="x",
    )
    add("avg_pool1d/plain", (2, 3, 7), 3, 1, stride=2)
    add("avg_pool2d/plain", (2, 3, 6, 7), [2, 3], 2)
    add("avg_pool2d/padding", (1, 2, 6, 6), 3, 2, stride=2, padding=1)
    add("avg_pool2d/ceil", (1, 2, 6, 7), 3, 2, stride=2, padding=1, ceil_mode=True)
    add("avg_pool2d/exclude", (1, 2, 6, 7), 3, 2, stride=2, padding=1, ceil_mode=True, count_include_pad=False)
    add("avg_pool2d/divisor", (1, 2, 4, 4), 2, 2, divisor_override=3)
    add("avg_pool3d/plain", (1, 2, 4, 4, 5), [2, 2, 3], 3, padding=[1, 0, 1])
    add("adaptive_avg_pool1d/uneven", (2, 3, 7), 3, 1)
    add("adaptive_avg_pool2d/one", (2, 3, 4, 5), 1, 2)
    add("adaptive_avg_pool2d/uneven", (2, 3, 7, 5), [3, 4], 2)
    add("adaptive_avg_pool3d/uneven", (1, 2, 3, 5, 4), [2, 3, 2], 3)
    add("adaptive_max_pool2d/uneven", (2, 3, 7, 5), [3, 4], 2)


def norms(r):
    running = {"mean": normal(3), "var": uniform(3, low=0.5, high=2)}
    affine = {"weight": normal(3), "bias": normal(3)}

    def add(name, x, inputs, **options):
        listed = "".join(f", {key}={key}" for key in [*list(inputs), *options])
        r.add(
            f"batch_norm/{name}",
            f"batch_norm(x, mean, var{listed})",
            {"x": normal(*x), **running, **inputs},
            options,
            ("out", "mean", "var"),
            grads=" ".join(["x", *inputs]),
            note="the result, then the running statistics",
        )

    add("training", (4, 3, 2, 5), affine, training=True)
    add("momentum", (6, 3), affine, training=True, momentum=0.3, eps=1e-3)
    add("plain", (2, 3, 4), {}, training=True)
    add("eval", (4, 3, 2, 5), affine, training=False)
    add("eval_plain", (2, 3, 2, 2, 2), {}, training=False)
    channels = {"weight": normal(6), "bias": normal(6)}
    r.add(
        "group_norm/affine",
        "F.group_norm(x, groups, weight, bias)",
        {"x": normal(2, 6, 3, 2), **channels},
        {"groups": 3},
        grads="x weight bias",
    )
    r.add("group_norm/plain", "F.group_norm(x, groups)", {"x": normal(2, 6, 4)}, {"groups": 2}, grads="x")
    r.add(
        "instance_norm/affine",
        "F.instance_norm(x, weight=weight, bias=bias)",
        {"x": normal(2, 6, 3, 2), **channels},
        grads="x weight bias",
    )


def interpolations(r):
    def add(name, x, **options):
        listed = "".join(f", {key}={key}" for key in options)
        r.add(f"interpolate/{name}", f"F.interpolate(x{listed})", {"x": normal(*x)}, options, grads="x")

    add("nearest", (1, 2, 4, 5), size=[7, 3])
    add("nearest_scale", (2, 1, 5), scale_factor=1.5)
    add("bilinear", (1, 2, 4, 5), size=[7, 3], mode="bilinear")
    add("bilinear_corners", (1, 2, 4, 5), size=[7, 3], mode="bilinear", align_corners=True)
    add("bilinear_scale", (1, 2, 4, 5), scale_factor=[2.0, 1.3], mode="bilinear")
    add("linear", (1, 2, 5), size=8, mode="linear")
    add("trilinear", (1, 1, 3, 2, 4), scale_factor=2.0, mode="trilinear")


FAMILIES = (convolutions, transposes, pools, norms, interpolations)
