"""Cases of convolutional networks: convolutions and their transposes, over one to three spatial dims."""

from golden_cases import normal


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


FAMILIES = (convolutions, transposes)
