"""The GPT-2 block of nanoGPT in plain PyTorch: the model behind the golden files, the training recipe and the timings.

Pre-norm LayerNorm, learned positions, causal attention, residual projections initialised with a smaller deviation.
Works from PyTorch 1.13 on. Names of parameters are the ones nanoGPT uses, without its `transformer.` prefix.

Legend: B batch, T tokens, D width, V vocabulary, H heads.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    layers: int = 4
    heads: int = 4
    dim: int = 128
    vocab: int = 65
    context: int = 64
    bias: bool = False  # in linears and layer norms
    gelu: str = "none"  # "none" is the erf form, "tanh" the approximation
    tied: bool = True  # the head shares wte.weight


class LayerNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.dim))
        self.bias = nn.Parameter(torch.zeros(config.dim)) if config.bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """`fused` uses scaled_dot_product_attention (PyTorch 2); the plain form is the definition."""

    def __init__(self, config, fused):
        super().__init__()
        self.heads, self.fused = config.heads, fused
        self.c_attn = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)  # rows: q, k, v
        self.c_proj = nn.Linear(config.dim, config.dim, bias=config.bias)
        mask = torch.ones(config.context, config.context, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(D, dim=2)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            y = scores.masked_fill(~self.mask[:T, :T], float("-inf")).softmax(dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, D))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gelu = config.gelu
        self.c_fc = nn.Linear(config.dim, 4 * config.dim, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.dim, config.dim, bias=config.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu))


class Block(nn.Module):
    def __init__(self, config, fused):
        super().__init__()
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, fused)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config, fused_attention=False):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.dim)
        self.wpe = nn.Embedding(config.context, config.dim)
        self.h = nn.ModuleList(Block(config, fused_attention) for _ in range(config.layers))
        self.ln_f = LayerNorm(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        self.initialise()

    def initialise(self):
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, residual if name.endswith("c_proj.weight") else 0.02)

    def forward(self, ids):
        """ids [B, T] -> logits [B, T, V]."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in self.h:
            x = block(x)
        head = self.wte.weight if self.config.tied else self.lm_head.weight
        return F.linear(self.ln_f(x), head)

    def loss(self, ids, targets):
        logits = self(ids)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def adamw(model, lr, betas, weight_decay, **options):
    """AdamW that decays 2-D parameters only (matrices and embeddings, not norms and biases)."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, **options)
