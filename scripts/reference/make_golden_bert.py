#!/usr/bin/env python3
"""Writes tests/golden/bert_tiny.safetensors: a small BERT by Hugging Face's transformers, as independent implementation.

How: BertForMaskedLM and BertForSequenceClassification with random weights (moved away from their initial values, so that
no gradient is trivial), no dropout, one batch with segments and padding, in fp64.

Tensors (H is mlm or cls, P a parameter's name as transformers has it):
  H/init/P, H/grad/P  weights; gradients of the loss (F64)
  H/logits            [B, T, V] or [B, classes]
  H/loss              []
  ids, segments, mlm/targets  [B, T] I64 (-100: no target); key_mask [B, T] U8; cls/targets [B] I64
Metadata: torch, transformers (versions), config (JSON).

Usage: make_golden_bert.py [--out DIR]     (pip install torch transformers)
"""

import argparse
import json
import pathlib

import torch
import transformers

import safetensors_io

CONFIG = {"vocab": 61, "context": 16, "layers": 2, "heads": 2, "dim": 16, "hidden": 40}
BATCH, LENGTH, CLASSES = 3, 9, 4


def run(model, targets, inputs):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    model.eval()
    out = model(**inputs, labels=targets)
    out.loss.backward()
    stored = {"logits": out.logits.detach(), "loss": out.loss.detach()}
    for name, p in model.named_parameters():  # tied ones once
        stored[f"init/{name}"] = p.detach().clone()
        stored[f"grad/{name}"] = p.grad.clone()
    return stored


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parents[2] / "tests/golden")
    args = parser.parse_args()
    torch.manual_seed(1337)
    torch.set_default_dtype(torch.float64)
    config = transformers.BertConfig(
        vocab_size=CONFIG["vocab"], max_position_embeddings=CONFIG["context"],
        num_hidden_layers=CONFIG["layers"], num_attention_heads=CONFIG["heads"],
        hidden_size=CONFIG["dim"], intermediate_size=CONFIG["hidden"], hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=CLASSES, pad_token_id=None)
    ids = torch.randint(CONFIG["vocab"], (BATCH, LENGTH))
    segments = (torch.arange(LENGTH) > 4).long().expand(BATCH, LENGTH).contiguous()
    key_mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    key_mask[1, 6:] = 0
    inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": key_mask}
    targets = torch.where(torch.rand(BATCH, LENGTH) < 0.4, ids, torch.tensor(-100))
    classes = torch.randint(CLASSES, (BATCH,))
    tensors = {"ids": ids, "segments": segments, "key_mask": key_mask.to(torch.uint8),
               "mlm/targets": targets, "cls/targets": classes}
    for head, model, target in (
            ("mlm", transformers.BertForMaskedLM(config), targets),
            ("cls", transformers.BertForSequenceClassification(config), classes)):
        tensors.update((f"{head}/{name}", t) for name, t in run(model.double(), target, inputs).items())
    metadata = {"made_by": "scripts/reference/make_golden_bert.py", "torch": torch.__version__,
                "transformers": transformers.__version__,
                "config": json.dumps({**CONFIG, "classes": CLASSES})}
    safetensors_io.save(args.out / "bert_tiny.safetensors", tensors, metadata)


if __name__ == "__main__":
    main()
