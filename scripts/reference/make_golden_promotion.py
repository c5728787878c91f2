"""Writes tests/golden/type_promotion.json: what torch.result_type says for every pair of our dtypes.

How: torch.result_type on small tensors, for all pairs of bool u8 i32 i64 f16 bf16 f32 f64 in the categories in which
PyTorch ranks operands (a tensor with dims before a 0-dim tensor before a Python number), with the default dtype f32.

Keys:
  metadata                               versions
  dtypes                                 the list above
  tensor_tensor.{dim_dim,dim_0d,0d_0d}   [left][right] -> dtype; in dim_0d the left operand has dims, the right is 0-dim
  tensor_scalar.{dim,0d}                 [tensor][scalar] -> dtype, scalar in bool int float (a Python number)
  unary                                  [op][dtype] -> dtype of the result, or "error" where PyTorch refuses
  binary                                 [op][left][right] -> same, both operands with dims

Usage: make_golden_promotion.py [--out FILE]
"""

import argparse
import json
import pathlib

import torch

DTYPES = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SCALARS = {"bool": True, "int": 1, "float": 1.0}
UNARY = (
    "abs neg sign square sqrt rsqrt reciprocal exp log sin tanh erf sigmoid floor round trunc "
    "isnan logical_not bitwise_not sum prod mean var cumsum cumprod argmax amax any all "
    "logsumexp"
).split()
BINARY = (
    "add sub mul true_divide floor_divide remainder fmod pow maximum atan2 "
    "eq lt logical_and bitwise_and bitwise_left_shift"
).split()


def tensor(dtype, ndim):
    return torch.ones((2,) * ndim).to(dtype)


def tensor_tensor(left_ndim, right_ndim):
    return {
        left: {
            right: NAMES[torch.result_type(tensor(a, left_ndim), tensor(b, right_ndim))]
            for right, b in DTYPES.items()
        }
        for left, a in DTYPES.items()
    }


def tensor_scalar(ndim):
    return {
        name: {
            kind: NAMES[torch.result_type(tensor(dtype, ndim), value)]
            for kind, value in SCALARS.items()
        }
        for name, dtype in DTYPES.items()
    }


def result_of(op, *operands):
    """Dtype of the op's result, or "error"."""
    arguments = (0,) if op in ("cumsum", "cumprod", "logsumexp") else ()
    try:
        return NAMES[getattr(torch, op)(*operands, *arguments).dtype]
    except RuntimeError:
        return "error"


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description="Writes the table of type promotion.")
    parser.add_argument(
        "--out", type=pathlib.Path, default=root / "tests" / "golden" / "type_promotion.json"
    )
    out = parser.parse_args().out
    table = {
        "metadata": {
            "made_by": "scripts/reference/make_golden_promotion.py",
            "torch": torch.__version__,
            "default_dtype": NAMES[torch.get_default_dtype()],
        },
        "dtypes": list(DTYPES),
        "tensor_tensor": {
            "dim_dim": tensor_tensor(1, 1),
            "dim_0d": tensor_tensor(1, 0),
            "0d_0d": tensor_tensor(0, 0),
        },
        "tensor_scalar": {"dim": tensor_scalar(1), "0d": tensor_scalar(0)},
        "unary": {
            op: {name: result_of(op, tensor(dtype, 1)) for name, dtype in DTYPES.items()}
            for op in UNARY
        },
        "binary": {
            op: {
                left: {
                    right: result_of(op, tensor(a, 1), tensor(b, 1)) for right, b in DTYPES.items()
                }
                for left, a in DTYPES.items()
            }
            for op in BINARY
        },
    }
    out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
