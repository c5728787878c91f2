"""Records golden cases: a PyTorch call as text, its inputs, its results and its gradients.

The call that is stored is the call that is run (by eval), so a case cannot claim one thing and hold another. It sees
torch, F (torch.nn.functional), inf, nan, DTYPES, the inputs, the attributes, and the helpers a generator adds.
"""

import json
import math
import zlib

import torch
from torch.nn import functional as F

import safetensors_io

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


class Random:
    """Values drawn once the case is known: its name is the seed, so a new case does not change the others."""

    def __init__(self, draw):
        self.draw = draw


def normal(*shape):
    return Random(lambda g: torch.randn(shape, generator=g, dtype=torch.float64))


def uniform(*shape, low=0.0, high=1.0):
    return Random(
        lambda g: torch.rand(shape, generator=g, dtype=torch.float64) * (high - low) + low
    )


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def i64(values):
    return torch.tensor(values, dtype=torch.int64)


def boolean(values):
    return torch.tensor(values, dtype=torch.bool)


class Recorder:
    def __init__(self, helpers):
        self.helpers = helpers
        self.tensors = {}
        self.cases = []

    def add(self, name, call, inputs=None, attributes=None, outputs=("out",), grads="", note=""):
        """Runs and stores one case.

        name: "op/variant"; outputs: names of the results, in the order of the call's tuple; grads: the inputs to
        differentiate, separated by spaces. The scalar differentiated is the sum over the floating-point outputs that
        depend on them of out * cotangent, with random cotangents.
        """
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        inputs = {
            key: value.draw(generator) if isinstance(value, Random) else value.clone()
            for key, value in (inputs or {}).items()
        }
        attributes = attributes or {}
        grads = grads.split()
        entry = {
            "name": name,
            "op": name.split("/")[0],
            "call": call,
            "attributes": attributes,
            "inputs": list(inputs),
            "outputs": list(outputs),
            "grads": grads,
        }
        if note:
            entry["note"] = note
        for key, value in inputs.items():
            self._store(f"{name}/in/{key}", value)
        for key in grads:
            inputs[key].requires_grad_()

        scope = {"torch": torch, "F": F, "inf": math.inf, "nan": math.nan, "DTYPES": DTYPES}
        results = eval(call, {**scope, **self.helpers, **attributes, **inputs})  # noqa: S307
        results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
        if len(results) != len(outputs):
            raise ValueError(f"{name}: {len(results)} results, but {len(outputs)} names")
        cotangents = {}
        for key, value in zip(outputs, results):
            value = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            self._store(f"{name}/out/{key}", value)
            if value.requires_grad:
                cotangents[key] = torch.randn(value.shape, generator=generator, dtype=value.dtype)
                self._store(f"{name}/cotangent/{key}", cotangents[key])
        if grads:
            total = sum(
                (dict(zip(outputs, results))[key] * c).sum() for key, c in cotangents.items()
            )
            for key, grad in zip(
                grads,
                torch.autograd.grad(
                    total, [inputs[k] for k in grads], allow_unused=True, materialize_grads=True
                ),
            ):
                self._store(f"{name}/grad/{key}", grad)
        self.cases.append(entry)

    def _store(self, name, tensor):
        if name in self.tensors:
            raise ValueError(f"{name} is stored twice")
        self.tensors[name] = tensor.detach().clone()

    def write(self, folder, stem, made_by):
        metadata = {"made_by": made_by, "torch": torch.__version__}
        safetensors_io.save(folder / f"{stem}.safetensors", self.tensors, metadata)
        cases = ",\n".join("  " + json.dumps(case, allow_nan=False) for case in self.cases)
        text = f'{{\n "metadata": {json.dumps(metadata)},\n "cases": [\n{cases}\n ]\n}}\n'
        (folder / f"{stem}.json").write_text(text)
