"""Writes tests/golden/hugging_face/{gpt2,bert}: tiny models as transformers saves them, with their logits.

Each folder holds config.json and model.safetensors of save_pretrained; beside it NAME_logits.safetensors: "ids" [2, T] i64,
"logits" [2, T, V] f32. Biases and norms are drawn too, for their initial zeros and ones would hide mistakes.

Usage: make_golden_hugging_face.py [--out DIR]
       make_golden_hugging_face.py --check DIR   # DIR/gpt2 or DIR/bert, saved by `train --save DIR/`, has these logits
"""

import argparse
import pathlib

import safetensors_io
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "hugging_face"
LENGTH, VOCAB = 6, 20
MODELS = {"gpt2": GPT2LMHeadModel, "bert": BertForMaskedLM}


def make(name):
    torch.manual_seed(1)
    if name == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    else:
        config = BertConfig(
            vocab_size=VOCAB,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=8,
        )
    model = MODELS[name](config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


def main():
    parser = argparse.ArgumentParser(description="Writes tiny Hugging Face folders, or checks saved ones.")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT)
    parser.add_argument("--check", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.check:
        for name, kind in MODELS.items():
            if not (arguments.check / name).is_dir():
                continue
            model, info = kind.from_pretrained(arguments.check / name, output_loading_info=True)
            assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
            stored, _ = safetensors_io.load(ROOT / f"{name}_logits.safetensors")
            difference = (logits_of(model, stored["ids"]) - stored["logits"]).abs().max().item()
            print(f"{name}: largest difference of a logit {difference:.3g}")
            assert difference == 0
        return
    for name in MODELS:
        folder = arguments.out / name
        model = make(name)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(2))
        tensors = {"ids": ids, "logits": logits_of(model, ids)}
        safetensors_io.save(
            arguments.out / f"{name}_logits.safetensors", tensors, {"made_by": "make_golden_hugging_face.py", "torch": torch.__version__}
        )


if __name__ == "__main__":
    main()
