"""Writes tests/golden/gpt_tiny.safetensors and gpt_tiny_options.safetensors: a GPT trained for ten steps by PyTorch.

How: a model from gpt.py is initialised in fp64, ten batches of random tokens are drawn, and the same ten AdamW steps
(gradients clipped to a global norm) are run once in fp64 and once in fp32 from the weights cast to fp32, on one thread.
`gpt_tiny` is the default model as initialised. `gpt_tiny_options` has biases, tanh-GELU and an untied head, and every
parameter is moved away from its initial value so that no gradient is trivial.

Tensors (P stands for each parameter's name, R for fp64 or fp32; R/... have that dtype, the rest are F64 or I64):
  init/P            weights before the first step (F64; the fp32 run casts them)
  ids, targets      [steps, B, T] I64
  R/logits          [B, T, V] of the first batch before any step
  R/grad/P          gradients of the first batch's loss, before clipping
  R/losses          [steps] loss of each step's batch, before its update; losses[0] belongs to R/grad
  R/grad_norms      [steps] global norm before clipping
  R/final/P         weights after the last step
Metadata: torch (version), config (JSON of the model), optimizer (JSON), vanishing (JSON list of what has a gradient of
zero in exact arithmetic, so that only rounding errors are stored there: {"name", "rows": [begin, end]}).

Usage: make_golden_gpt.py [--out DIR]
"""

import argparse
import json
import pathlib
from dataclasses import asdict

import torch

import safetensors_io
from gpt import GPT, GPTConfig, adamw

STEPS = 10
BATCH = 4
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1}


def train(config, init, ids, targets, clip_norm, dtype):
    """Runs the steps from `init` in `dtype`; returns the tensors to store, without the prefix."""
    model = GPT(config).to(dtype)
    model.load_state_dict({name: value.to(dtype) for name, value in init.items()})
    optimizer = adamw(model, OPTIMIZER["lr"], OPTIMIZER["betas"], OPTIMIZER["weight_decay"])
    stored, losses, norms = {}, [], []
    with torch.no_grad():
        stored["logits"] = model(ids[0])
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(ids[step], targets[step])
        loss.backward()
        if step == 0:
            stored.update((f"grad/{n}", p.grad.clone()) for n, p in model.named_parameters())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm).detach())
        optimizer.step()
        losses.append(loss.detach())
    stored["losses"], stored["grad_norms"] = torch.stack(losses), torch.stack(norms)
    stored.update((f"final/{n}", p.detach().clone()) for n, p in model.named_parameters())
    return stored


def write(path, config, clip_norm, perturb, vanishing):
    torch.manual_seed(1337)
    model = GPT(config).double()
    model.initialise()  # again, so that the weights carry all the digits of fp64
    if perturb:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=perturb)
    init = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = torch.randint(config.vocab, (STEPS, BATCH, config.context + 1))
    ids, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()

    tensors = {f"init/{name}": value for name, value in init.items()}
    tensors.update(ids=ids, targets=targets)
    for run, dtype in (("fp64", torch.float64), ("fp32", torch.float32)):
        result = train(config, init, ids, targets, clip_norm, dtype)
        tensors.update((f"{run}/{name}", value) for name, value in result.items())
    metadata = {
        "made_by": "scripts/reference/make_golden_gpt.py",
        "torch": torch.__version__,
        "config": json.dumps(asdict(config)),
        "optimizer": json.dumps({**OPTIMIZER, "clip_norm": clip_norm, "steps": STEPS}),
        "vanishing": json.dumps(vanishing),
    }
    safetensors_io.save(path, tensors, metadata)
    print(f"{path.name}: {path.stat().st_size} bytes, norms {tensors['fp64/grad_norms'].tolist()}")


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description="Writes the golden GPT files.")
    parser.add_argument("--out", type=pathlib.Path, default=root / "tests" / "golden")
    out = parser.parse_args().out
    torch.set_num_threads(1)

    config = GPTConfig(layers=2, heads=2, dim=32, vocab=65, context=16)
    write(out / "gpt_tiny.safetensors", config, clip_norm=1.0, perturb=0.0, vanishing=[])

    config = GPTConfig(
        layers=2, heads=2, dim=16, vocab=33, context=8, bias=True, gelu="tanh", tied=False
    )
    # Softmax ignores what is added to all scores of a query, so the bias of the keys gets no gradient.
    keys = [
        {"name": f"h.{layer}.attn.c_attn.bias", "rows": [config.dim, 2 * config.dim]}
        for layer in range(config.layers)
    ]
    path = out / "gpt_tiny_options.safetensors"
    write(path, config, clip_norm=1.2, perturb=0.1, vanishing=keys)  # clips only some steps


if __name__ == "__main__":
    main()
