"""Cases of operations that look at one element at a time: rounding, division, limits, casts, functions."""

from math import inf, nan

import torch

from golden_cases import DTYPES, boolean, f64, i64, normal, uniform

EDGES = [-inf, -3.7, -2.5, -1.5, -1.0, -0.5, -0.0, 0.0, 0.3, 0.5, 1.0, 1.5, 2.5, 3.7, inf, nan]


def rounding(r):
    for op in "round trunc floor ceil frac sign signbit isnan isinf isfinite".split():
        r.add(f"{op}/edges", f"torch.{op}(x)", {"x": f64(EDGES)})
    r.add(
        "round/decimals",
        "torch.round(x, decimals=decimals)",
        {"x": f64([1.125, 2.675, -0.045, 1234.5678])},
        {"decimals": 2},
    )
    r.add(
        "round/negative_decimals",
        "torch.round(x, decimals=decimals)",
        {"x": f64([15.0, 25.0, 1234.5, -151.0])},
        {"decimals": -1},
    )
    r.add(
        "copysign/zeros",
        "torch.copysign(x, y)",
        {"x": f64([1, -1, 0, nan, 3]), "y": f64([-0.0, 0.0, -2, -1, inf])},
    )


def division(r):
    a = f64([7, -7, 7, -7, 7.5, -7.5, 1, -1, 0, 1, inf, 5, -5, nan, 0.6])
    b = f64([3, 3, -3, -3, 2, 2, 0, 0, 0, inf, 2, -inf, inf, 1, 0.2])
    ints = {"a": i64([7, -7, 7, -7, 6, -6, 0, 1]), "b": i64([3, 3, -3, -3, 3, 3, 5, -2])}
    for op in "fmod remainder floor_divide true_divide".split():
        r.add(f"{op}/signs", f"torch.{op}(a, b)", {"a": a, "b": b})
        r.add(f"{op}/integers", f"torch.{op}(a, b)", ints)
    r.add("div/trunc", "torch.div(a, b, rounding_mode='trunc')", {"a": a, "b": b})
    r.add("div/floor", "torch.div(a, b, rounding_mode='floor')", {"a": a, "b": b})
    r.add("div/trunc_integers", "torch.div(a, b, rounding_mode='trunc')", ints)
    grid = {"a": uniform(8, low=-9, high=9), "b": uniform(8, low=0.5, high=3)}
    r.add("fmod/gradient", "torch.fmod(a, b)", grid, grads="a b")
    r.add("remainder/gradient", "torch.remainder(a, b)", grid, grads="a b")
    r.add("div/gradient", "torch.div(a, b)", grid, grads="a b")

    u8 = DTYPES["u8"]
    r.add(
        "sub/u8_wraps",
        "torch.sub(a, b)",
        {"a": torch.tensor([1, 200], dtype=u8), "b": torch.tensor([2, 100], dtype=u8)},
    )
    r.add(
        "mul/u8_wraps",
        "torch.mul(a, b)",
        {"a": torch.tensor([16, 255], dtype=u8), "b": torch.tensor([16, 255], dtype=u8)},
    )
    r.add("neg/u8_wraps", "torch.neg(a)", {"a": torch.tensor([0, 1, 255], dtype=u8)})
    r.add(
        "add/i32_wraps",
        "torch.add(a, b)",
        {
            "a": torch.tensor([2147483647], dtype=torch.int32),
            "b": torch.tensor([1], dtype=torch.int32),
        },
    )
    r.add(
        "add/bool",
        "torch.add(a, b)",
        {"a": boolean([True, True, False]), "b": boolean([True, False, False])},
    )
    r.add(
        "mul/bool",
        "torch.mul(a, b)",
        {"a": boolean([True, True, False]), "b": boolean([True, False, False])},
    )
    r.add(
        "add/alpha",
        "torch.add(a, b, alpha=alpha)",
        {"a": normal(3), "b": normal(3)},
        {"alpha": -2.5},
        grads="a b",
    )
    r.add(
        "add/broadcast", "torch.add(a, b)", {"a": normal(2, 1, 4), "b": normal(3, 1)}, grads="a b"
    )


def powers(r):
    r.add(
        "pow/edges",
        "torch.pow(a, b)",
        {
            "a": f64([0, 0, 0, -8, inf, 1, nan, -2, -2, -0.0, -inf, 0.5, -1, 2]),
            "b": f64([0, 1, -1, 1 / 3, 0, nan, 0, 3, -2, -1, 3, inf, inf, -inf]),
        },
    )
    r.add(
        "pow/integers",
        "torch.pow(a, b)",
        {"a": i64([2, -2, 0, 3, -1, 10]), "b": i64([10, 3, 0, 0, 5, 18])},
    )
    r.add(
        "pow/negative_integer_exponent",
        "torch.pow(a, b)",
        {"a": i64([2, 1, -1, -1, -3]), "b": i64([-1, -5, -2, -3, -1])},
        note="integer tensors: 0 unless the base is 1 or -1",
    )
    r.add("pow/scalar_base", "torch.pow(2, b)", {"b": f64([-1, 0, 0.5, 3])}, grads="b")
    r.add(
        "pow/gradient_at_zero",
        "torch.pow(a, b)",
        {"a": f64([0, 0, 0, 2, -2]), "b": f64([0, 1, 2, 0, 2])},
        grads="a",
    )
    for exponent in (2, 0.5, -1, 3, 0):
        r.add(
            f"pow/scalar_{exponent}",
            "torch.pow(a, exponent)",
            {"a": uniform(5, low=0.2, high=3)},
            {"exponent": exponent},
            grads="a",
        )
    r.add(
        "pow/gradient",
        "torch.pow(a, b)",
        {"a": uniform(5, low=0.2, high=3), "b": normal(5)},
        grads="a b",
    )


def clamping(r):
    x = {"x": f64(EDGES)}
    r.add(
        "clamp/both",
        "torch.clamp(x, min, max)",
        x,
        {"min": -1.0, "max": 1.5},
        grads="x",
        note="no gradient at the bounds themselves (PyTorch 1.13 passed it) nor for nan",
    )
    r.add("clamp/min_only", "torch.clamp(x, min=min)", x, {"min": 0.3}, grads="x")
    r.add("clamp/max_only", "torch.clamp(x, max=max)", x, {"max": 0.3}, grads="x")
    r.add(
        "clamp/crossed",
        "torch.clamp(x, min, max)",
        x,
        {"min": 2.0, "max": -2.0},
        note="min > max gives max",
    )
    r.add(
        "clamp/tensors",
        "torch.clamp(x, min=low, max=high)",
        {
            "x": f64([-3, 0, 3, 1, nan, 2]),
            "low": f64([-1, 0, 0, nan, 0, 5]),
            "high": f64([1, 1, 1, 2, 1, 4]),
        },
        grads="x low high",
    )
    r.add(
        "clamp/integers", "torch.clamp(x, min, max)", {"x": i64([-5, 0, 5])}, {"min": -2, "max": 3}
    )
    pair = {"a": f64([1, 2, 3, nan, 1, nan, -0.0, inf]), "b": f64([2, 2, 1, 1, nan, nan, 0.0, 5])}
    for op in "maximum minimum fmax fmin".split():
        r.add(
            f"{op}/ties_and_nan",
            f"torch.{op}(a, b)",
            pair,
            grads="a b",
            note="equal elements share the gradient (not in fmax and fmin of PyTorch 1.13)",
        )
    r.add("nan_to_num/default", "torch.nan_to_num(x)", x)
    r.add("nan_to_num/values", "torch.nan_to_num(x, nan=7.0, posinf=9.0, neginf=-9.0)", x)
    r.add(
        "isclose/default",
        "torch.isclose(a, b)",
        {
            "a": f64([1, 1, nan, inf, inf, 0, 1e-9]),
            "b": f64([1 + 1e-6, 1.1, nan, inf, -inf, 1e-8, 0]),
        },
    )
    r.add(
        "isclose/equal_nan",
        "torch.isclose(a, b, equal_nan=True)",
        {"a": f64([nan, 1]), "b": f64([nan, nan])},
    )
    for op in "eq ne lt le gt ge".split():
        r.add(f"{op}/nan", f"torch.{op}(a, b)", pair)
    values = {"a": f64([0, -0.0, 1, nan, inf]), "b": f64([0, 1, 2, 0, nan])}
    for op in "logical_and logical_or logical_xor".split():
        r.add(f"{op}/numbers", f"torch.{op}(a, b)", values)
    r.add("logical_not/numbers", "torch.logical_not(a)", {"a": values["a"]})
    bits = {"a": i64([-8, 5, 0, 7]), "b": i64([3, 1, 6, 2])}
    for op in "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift".split():
        r.add(f"{op}/signs", f"torch.{op}(a, b)", bits)
    r.add("bitwise_not/integers", "torch.bitwise_not(a)", {"a": bits["a"]})
    r.add("bitwise_not/bool", "torch.bitwise_not(a)", {"a": boolean([True, False])})


def casts(r):
    wide = f64(
        [
            0.1,
            1 / 3,
            65504,
            65519.9,
            65520,
            1e-8,
            2.98e-8,
            6e-8,
            1 + 2**-11,
            1 + 3 * 2**-11,
            -2.5,
            3.4e38,
            1e39,
            inf,
            -inf,
            nan,
            -0.0,
            1 + 2**-8,
            1 + 3 * 2**-8,
            1 + 2**-8 + 2**-30,
        ]
    )
    for source in ("f64", "f32"):
        for target in ("f16", "bf16", "f32"):
            if source != target:
                r.add(
                    f"to/{source}_to_{target}",
                    "x.to(DTYPES[dtype])",
                    {"x": wide.to(DTYPES[source])},
                    {"dtype": target},
                )
    r.add(
        "to/f64_to_i64",
        "x.to(DTYPES[dtype])",
        {"x": f64([2.9, -2.9, 0.5, -0.5, 1e15])},
        {"dtype": "i64"},
    )
    r.add("to/f64_to_u8", "x.to(DTYPES[dtype])", {"x": f64([0, 1.9, 255.9])}, {"dtype": "u8"})
    r.add(
        "to/f64_to_bool", "x.to(DTYPES[dtype])", {"x": f64([0, -0.0, 0.1, nan])}, {"dtype": "bool"}
    )
    r.add(
        "to/i64_to_i32", "x.to(DTYPES[dtype])", {"x": i64([2**31, -1, 2**40 + 5])}, {"dtype": "i32"}
    )
    r.add(
        "to/i64_to_f32", "x.to(DTYPES[dtype])", {"x": i64([2**24 + 1, 2**53 + 1])}, {"dtype": "f32"}
    )


def pointwise(r):
    everywhere = (
        "exp expm1 sin cos tan tanh sinh cosh asinh atan erf erfc sigmoid square abs relu "
        "exp2 sinc sign"
    )
    positive = "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma"
    inside = "asin acos atanh logit erfinv"
    for op in everywhere.split():
        r.add(
            f"{op}/values", f"torch.{op}(x)", {"x": f64([-3, -1, -0.25, 0, 0.25, 1, 3])}, grads="x"
        )
    for op in positive.split():
        r.add(f"{op}/values", f"torch.{op}(x)", {"x": f64([0.01, 0.5, 1, 1.5, 4, 100])}, grads="x")
    for op in inside.split():
        r.add(f"{op}/values", f"torch.{op}(x)", {"x": f64([0.01, 0.3, 0.5, 0.9])}, grads="x")
    for (
        op
    ) in (
        "exp expm1 log log1p log2 sqrt rsqrt reciprocal tanh sigmoid erf erfc sin relu abs".split()
    ):
        r.add(
            f"{op}/edges",
            f"torch.{op}(x)",
            {"x": f64([*EDGES, 2.3e-308, 1e-300, 709.7, 709.8, 750, -745, -746, 1e308])},
        )
    r.add("sqrt/at_zero", "torch.sqrt(x)", {"x": f64([0, 1])}, grads="x")
    activations = {
        "silu": "F.silu(x)",
        "mish": "F.mish(x)",
        "relu6": "F.relu6(x)",
        "selu": "F.selu(x)",
        "elu": "F.elu(x, 0.7)",
        "celu": "F.celu(x, 0.7)",
        "leaky_relu": "F.leaky_relu(x, 0.1)",
        "softplus": "F.softplus(x, 2.0, 5.0)",
        "softsign": "F.softsign(x)",
        "hardtanh": "F.hardtanh(x)",
        "hardsigmoid": "F.hardsigmoid(x)",
        "hardswish": "F.hardswish(x)",
        "logsigmoid": "F.logsigmoid(x)",
        "tanhshrink": "F.tanhshrink(x)",
        "softshrink": "F.softshrink(x, 0.5)",
        "hardshrink": "F.hardshrink(x, 0.5)",
        "threshold": "F.threshold(x, 0.5, -2.0)",
        "gelu": "F.gelu(x)",
        "gelu_tanh": "F.gelu(x, approximate='tanh')",
    }
    x = f64([-800, -40, -6, -3, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 3, 6, 40, 800])
    for op, call in activations.items():
        r.add(f"{op}/values", call, {"x": x}, grads="x")
    r.add("glu/dim", "F.glu(x, 1)", {"x": normal(2, 4)}, grads="x")
    r.add(
        "prelu/channels",
        "F.prelu(x, weight)",
        {"x": normal(2, 3, 2), "weight": normal(3)},
        grads="x weight",
    )
    pairs = {"a": f64([0, 0, 1, -1, 2, -0.0]), "b": f64([1, -1, 2, -2, 0.5, -1])}
    for op in "atan2 hypot logaddexp logaddexp2".split():
        r.add(f"{op}/quadrants", f"torch.{op}(a, b)", pairs, grads="a b")
    r.add(
        "logaddexp/infinities",
        "torch.logaddexp(a, b)",
        {"a": f64([-inf, -inf, inf, inf, 800]), "b": f64([-inf, 1, inf, -inf, 800])},
    )
    r.add(
        "xlogy/zeros",
        "torch.xlogy(a, b)",
        {"a": f64([0, 0, 0, 2, 0]), "b": f64([0, -1, nan, 3, inf])},
    )
    r.add(
        "xlogy/gradient", "torch.xlogy(a, b)", {"a": f64([0, 2]), "b": f64([3, 0.5])}, grads="a b"
    )
    r.add(
        "lerp/weights",
        "torch.lerp(a, b, w)",
        {"a": normal(4), "b": normal(4), "w": f64([0, 0.3, 0.5, 1.5])},
        grads="a b w",
    )
    r.add(
        "addcmul/value",
        "torch.addcmul(a, b, c, value=0.5)",
        {"a": normal(3), "b": normal(3), "c": normal(3)},
        grads="a b c",
    )
    r.add(
        "addcdiv/value",
        "torch.addcdiv(a, b, c, value=0.5)",
        {"a": normal(3), "b": normal(3), "c": uniform(3, low=1, high=2)},
        grads="a b c",
    )


FAMILIES = (
    rounding,
    division,
    powers,
    clamping,
    casts,
    pointwise,
)
