"""Writes tests/golden/ops.json and ops.safetensors: small cases of what is easy to get wrong in an operation.

How: each case is one PyTorch call on small fp64 (or integer) tensors; the cases are in ops_elementwise.py, ops_tensor.py,
ops_nn.py, ops_conv.py, ops_linalg.py and ops_sparse.py, the recorder is golden_cases.py. Needs a PyTorch that has
scaled_dot_product_attention with enable_gqa, and rms_norm (2.5 or newer).

ops.json: {"metadata": {made_by, torch}, "cases": [{"name", "op", "call", "attributes", "inputs", "outputs", "grads",
"note"?}]}. The tensors of a case are NAME/in/INPUT, NAME/out/OUTPUT, NAME/cotangent/OUTPUT (for outputs that depend on
a differentiated input) and NAME/grad/INPUT (for each of "grads"; the gradient of the sum of out * cotangent).

Usage: make_golden_ops.py [--out DIR]
"""

import argparse
import pathlib

import torch

import ops_conv
import ops_elementwise
import ops_linalg
import ops_nn
import ops_sparse
import ops_tensor
from golden_cases import Recorder


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description="Writes the golden cases of operations.")
    parser.add_argument("--out", type=pathlib.Path, default=root / "tests" / "golden")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    recorder = Recorder({**ops_nn.HELPERS, **ops_conv.HELPERS})
    for module in (ops_elementwise, ops_tensor, ops_nn, ops_conv, ops_linalg, ops_sparse):
        for family in module.FAMILIES:
            family(recorder)
    recorder.write(out, "ops", "scripts/reference/make_golden_ops.py")
    print(f"{len(recorder.cases)} cases, {len(recorder.tensors)} tensors")


if __name__ == "__main__":
    main()
