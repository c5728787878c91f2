"""BERT (Devlin et al. 2019) as a masked language model in plain PyTorch, for timings; the golden file has Hugging Face's.

Post-norm encoder layers over word and position embeddings (all tokens in segment 0), the head tied to the word embeddings.
Works from PyTorch 1.13 on. Defaults are BERT-base without dropout.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.dense = nn.Linear(dim, dim)
        self.intermediate, self.output = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.norm_1, self.norm_2 = nn.LayerNorm(dim, eps=1e-12), nn.LayerNorm(dim, eps=1e-12)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (
            f(x).view(B, T, self.heads, D // self.heads).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-2, -1) * (D // self.heads) ** -0.5).softmax(dim=-1) @ v
        x = self.norm_1(x + self.dense(y.transpose(1, 2).reshape(B, T, D)))
        return self.norm_2(x + self.output(F.gelu(self.intermediate(x))))


class Bert(nn.Module):
    def __init__(self, vocab=30522, context=512, segments=2, layers=12, heads=12, dim=768, hidden=3072, fused_attention=True):
        super().__init__()
        self.vocab = vocab
        self.words, self.positions = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.segments = nn.Embedding(segments, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden, fused_attention) for _ in range(layers))
        self.transform, self.transform_norm = nn.Linear(dim, dim), nn.LayerNorm(dim, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocab))
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, ids):
        x = self.norm(self.words(ids) + self.segments.weight[0] + self.positions.weight[: ids.size(1)])
        for layer in self.layers:
            x = layer(x)
        x = self.transform_norm(F.gelu(self.transform(x)).float())  # 1.13 normalises no bf16 with f32 weights
        return F.linear(x, self.words.weight, self.bias)

    def loss(self, ids, targets):
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())
