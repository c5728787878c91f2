"""Cases of what a network is trained with: losses, norms, attention, optimizers, clipping, schedules.

HELPERS are the functions that the calls use besides PyTorch's own.
"""

import math
from math import inf

import torch

from golden_cases import f64, i64, normal, uniform


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, which PyTorch does not have."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                c = b1 * m + (1 - b1) * p.grad
                p -= group["lr"] * (torch.sign(c) + group["weight_decay"] * p)
                m.copy_(b2 * m + (1 - b2) * p.grad)


def optimize(optimizer, p, grads, **options):
    """Parameters after each step of `optimizer` fed with the gradients grads[step]; [steps, ...]."""
    p = torch.nn.Parameter(p.clone())
    optimizer = (Lion if optimizer == "Lion" else getattr(torch.optim, optimizer))([p], **options)
    history = []
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        history.append(p.detach().clone())
    return torch.stack(history)


def learning_rates(steps, lr, make):
    """The learning rate used by each step, the first step being 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = make(torch.optim.lr_scheduler, optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return torch.tensor(rates, dtype=torch.float64)


def warmup_cosine(step, warmup, steps, lr, min_lr):
    """nanoGPT's schedule: linear from lr / (warmup + 1), cosine to min_lr at `steps`, min_lr after."""
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    if step > steps:
        return min_lr
    progress = (step - warmup) / (steps - warmup)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (lr - min_lr)


def clip(a, b, c, max_norm, norm_type):
    """Global norm and the clipped gradients."""
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in (a, b, c)]
    for p, g in zip(parameters, (a, b, c)):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return (norm, *(p.grad for p in parameters))


HELPERS = {
    "optimize": optimize,
    "learning_rates": learning_rates,
    "warmup_cosine": warmup_cosine,
    "clip": clip,
}


def losses(r):
    logits, target = normal(6, 5), i64([0, 4, 2, -100, 1, 2])
    weight = f64([0.5, 1.0, 2.0, 0.1, 3.0])
    for reduction in "mean sum none".split():
        for smoothing in (0.0, 0.1):
            for weighted in (False, True):
                inputs = {"x": logits, "target": target, **({"weight": weight} if weighted else {})}
                call = (
                    f"F.cross_entropy(x, target, {'weight, ' if weighted else ''}"
                    "reduction=reduction, label_smoothing=label_smoothing)"
                )
                name = f"cross_entropy/{reduction}_{smoothing}{'_weighted' if weighted else ''}"
                r.add(
                    name,
                    call,
                    inputs,
                    {"reduction": reduction, "label_smoothing": smoothing},
                    grads="x",
                )
    r.add(
        "cross_entropy/ignore_index",
        "F.cross_entropy(x, target, ignore_index=ignore_index)",
        {"x": normal(4, 3), "target": i64([0, 2, 2, 1])},
        {"ignore_index": 2},
        grads="x",
    )
    r.add(
        "cross_entropy/all_ignored",
        "F.cross_entropy(x, target)",
        {"x": normal(2, 3), "target": i64([-100, -100])},
        grads="x",
        note="0/0 is nan",
    )
    r.add(
        "cross_entropy/all_ignored_sum",
        "F.cross_entropy(x, target, reduction='sum')",
        {"x": normal(2, 3), "target": i64([-100, -100])},
        grads="x",
    )
    r.add(
        "cross_entropy/probabilities",
        "F.cross_entropy(x, target, label_smoothing=0.2)",
        {"x": normal(3, 4), "target": uniform(3, 4)},
        grads="x target",
    )
    r.add(
        "cross_entropy/dims",
        "F.cross_entropy(x, target)",
        {"x": normal(2, 3, 4), "target": i64([[0, 1, 2, 0], [2, 2, -100, 1]])},
        grads="x",
        note="classes are dim 1",
    )
    r.add(
        "cross_entropy/large_logits",
        "F.cross_entropy(x, target)",
        {"x": f64([[1000, 0, -1000], [-inf, 0, 1]]), "target": i64([0, 2])},
        grads="x",
    )
    r.add(
        "nll_loss/weighted",
        "F.nll_loss(x, target, weight)",
        {"x": normal(6, 5), "target": target, "weight": weight},
        grads="x",
    )
    pair = {"x": f64([0.5, -1, 2, 3, 1]), "y": f64([0, 1, 2, 1, 0])}
    for reduction in "mean sum none".split():
        for call in (
            "mse_loss(x, y",
            "l1_loss(x, y",
            "smooth_l1_loss(x, y, beta=0.7",
            "huber_loss(x, y, delta=0.7",
        ):
            r.add(
                f"{call.split('(')[0]}/{reduction}",
                f"F.{call}, reduction=reduction)",
                pair,
                {"reduction": reduction},
                grads="x y",
            )
    r.add(
        "binary_cross_entropy/ends",
        "F.binary_cross_entropy(x, y, reduction='none')",
        {"x": f64([0, 1, 0, 1, 0.3]), "y": f64([0, 1, 1, 0, 0.6])},
        note="the logarithm stops at -100",
    )
    r.add(
        "binary_cross_entropy/gradient",
        "F.binary_cross_entropy(x, y)",
        {"x": f64([0.1, 0.5, 0.9]), "y": f64([0, 1, 0.6])},
        grads="x",
    )
    r.add(
        "binary_cross_entropy_with_logits/pos_weight",
        "F.binary_cross_entropy_with_logits(x, y, weight, pos_weight=pos_weight)",
        {
            "x": f64([[-800, 0], [800, 2]]),
            "y": f64([[0, 1], [1, 0.3]]),
            "weight": f64([1, 2]),
            "pos_weight": f64([3, 0.5]),
        },
        grads="x",
    )
    for reduction in "mean sum batchmean none".split():
        r.add(
            f"kl_div/{reduction}",
            "F.kl_div(torch.log_softmax(x, 1), target, reduction=reduction)",
            {"x": normal(2, 3), "target": f64([[0.2, 0.3, 0.5], [0, 1, 0]])},
            {"reduction": reduction},
            grads="x",
        )


def norms(r):
    x = normal(2, 3, 4)
    r.add(
        "layer_norm/plain",
        "F.layer_norm(x, shape, eps=eps)",
        {"x": x},
        {"shape": [4], "eps": 1e-5},
        grads="x",
    )
    r.add(
        "layer_norm/weight",
        "F.layer_norm(x, shape, weight, None, eps)",
        {"x": x, "weight": normal(4)},
        {"shape": [4], "eps": 1e-5},
        grads="x weight",
    )
    r.add(
        "layer_norm/weight_bias",
        "F.layer_norm(x, shape, weight, bias, eps)",
        {"x": x, "weight": normal(3, 4), "bias": normal(3, 4)},
        {"shape": [3, 4], "eps": 1e-3},
        grads="x weight bias",
    )
    r.add(
        "layer_norm/constant_row",
        "F.layer_norm(x, shape, eps=eps)",
        {"x": f64([[5, 5, 5], [1e4, 1e4 + 1, 1e4 + 2]])},
        {"shape": [3], "eps": 1e-5},
        grads="x",
    )
    r.add(
        "rms_norm/weight",
        "F.rms_norm(x, shape, weight, eps)",
        {"x": x, "weight": normal(4)},
        {"shape": [4], "eps": 1e-5},
        grads="x weight",
    )
    r.add(
        "rms_norm/default_eps",
        "F.rms_norm(x, shape)",
        {"x": f64([[0, 0, 0], [1e-9, 0, 1e-9], [1, 2, 3]])},
        {"shape": [3]},
        note="the default eps is the dtype's machine epsilon",
    )
    r.add(
        "rms_norm/formula",
        "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight",
        {"x": x, "weight": normal(4)},
        {"eps": 1e-6},
        grads="x weight",
    )
    r.add("normalize/zero_row", "F.normalize(x, dim=1)", {"x": f64([[3, 4], [0, 0]])}, grads="x")
    r.add(
        "cosine_similarity/dim",
        "F.cosine_similarity(a, b, dim=1)",
        {"a": normal(2, 3), "b": normal(2, 3)},
        grads="a b",
    )


def attention(r):
    qkv = {"q": normal(2, 2, 5, 4), "k": normal(2, 2, 5, 4), "v": normal(2, 2, 5, 3)}
    longer = {"q": normal(2, 2, 3, 4), "k": normal(2, 2, 5, 4), "v": normal(2, 2, 5, 4)}
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[3, 1] = False
    sdpa = "F.scaled_dot_product_attention"
    op = "scaled_dot_product_attention"
    r.add(f"{op}/plain", f"{sdpa}(q, k, v)", qkv, grads="q k v")
    r.add(f"{op}/causal", f"{sdpa}(q, k, v, is_causal=True)", qkv, grads="q k v")
    r.add(
        f"{op}/causal_longer_keys",
        f"{sdpa}(q, k, v, is_causal=True)",
        longer,
        grads="q k v",
        note="the diagonal starts at the top left",
    )
    r.add(
        f"{op}/bool_mask",
        f"{sdpa}(q, k, v, attn_mask=mask)",
        {**qkv, "mask": mask},
        grads="q k v",
        note="True takes part",
    )
    r.add(
        f"{op}/additive_mask",
        f"{sdpa}(q, k, v, attn_mask=mask)",
        {**qkv, "mask": normal(2, 1, 5, 5)},
        grads="q k v mask",
    )
    r.add(
        f"{op}/infinite_mask",
        f"{sdpa}(q, k, v, attn_mask=mask)",
        {**qkv, "mask": torch.zeros(5, 5, dtype=torch.float64).masked_fill(~mask, -inf)},
        grads="q k v",
    )
    empty = mask.clone()
    empty[2] = False
    r.add(
        f"{op}/row_of_nothing",
        f"{sdpa}(q, k, v, attn_mask=mask)",
        {**qkv, "mask": empty},
        grads="q k v",
        note="a query that may see no key gives 0",
    )
    r.add(
        f"{op}/scale",
        f"{sdpa}(q, k, v, is_causal=True, scale=scale)",
        qkv,
        {"scale": 0.3},
        grads="q k v",
    )
    r.add(
        f"{op}/grouped_queries",
        f"{sdpa}(q, k, v, enable_gqa=True)",
        {"q": normal(1, 4, 3, 2), "k": normal(1, 2, 3, 2), "v": normal(1, 2, 3, 2)},
        grads="q k v",
    )


def optimizers(r):
    inputs = {"p": normal(3, 2), "grads": normal(5, 3, 2)}
    variants = {
        "SGD/plain": {"lr": 0.1},
        "SGD/momentum": {"lr": 0.1, "momentum": 0.9},
        "SGD/dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
        "SGD/nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        "SGD/weight_decay": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        "SGD/maximize": {"lr": 0.1, "momentum": 0.9, "maximize": True},
        "Adam/default": {"lr": 0.01},
        "Adam/weight_decay": {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1},
        "Adam/amsgrad": {"lr": 0.01, "amsgrad": True},
        "AdamW/default": {"lr": 0.01},
        "AdamW/options": {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1},
        "AdamW/no_decay": {"lr": 0.01, "weight_decay": 0.0},
        "RMSprop/default": {"lr": 0.01},
        "RMSprop/momentum": {"lr": 0.02, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.9},
        "RMSprop/centered": {"lr": 0.02, "alpha": 0.9, "centered": True},
        "RMSprop/centered_momentum": {"lr": 0.02, "alpha": 0.8, "centered": True, "momentum": 0.5},
        "Adagrad/default": {"lr": 0.1},
        "Adagrad/options": {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1, "eps": 1e-6},
        "Lion/default": {"lr": 0.01},
        "Lion/options": {"lr": 0.02, "betas": [0.7, 0.8], "weight_decay": 0.1},
    }
    for name, options in variants.items():
        listed = ", ".join(f"{key}={key}" for key in options)
        r.add(
            name,
            f"optimize('{name.split('/')[0]}', p, grads, {listed})",
            inputs,
            options,
            note="p after each step, fed with grads[step]",
        )
    r.add(
        "AdamW/tiny_gradients",
        "optimize('AdamW', p, grads, lr=lr)",
        {"p": normal(3), "grads": f64([[1e-9, 0, 1e3]] * 5)},
        {"lr": 0.01},
    )
    r.add(
        "clip_grad_norm/clipped",
        "clip(a, b, c, max_norm, norm_type)",
        {"a": normal(3, 2), "b": normal(4), "c": f64(2.0)},
        {"max_norm": 1.0, "norm_type": 2.0},
        ("norm", "a", "b", "c"),
        note="scaled by max_norm / (norm + 1e-6)",
    )
    r.add(
        "clip_grad_norm/below",
        "clip(a, b, c, max_norm, norm_type)",
        {"a": normal(3, 2), "b": normal(4), "c": f64(2.0)},
        {"max_norm": 100.0, "norm_type": 2.0},
        ("norm", "a", "b", "c"),
    )
    r.add(
        "clip_grad_norm/infinity_norm",
        "clip(a, b, c, max_norm, inf)",
        {"a": normal(3, 2), "b": normal(4), "c": f64(2.0)},
        {"max_norm": 1.0},
        ("norm", "a", "b", "c"),
    )


def schedules(r):
    attributes = {"steps": 24, "lr": 0.1}
    made = {
        "ConstantLR/default": "s.ConstantLR(o, factor=1 / 3, total_iters=5)",
        "LinearLR/warmup": "s.LinearLR(o, start_factor=0.1, total_iters=8)",
        "LinearLR/decay": "s.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=20)",
        "CosineAnnealingLR/plain": "s.CosineAnnealingLR(o, T_max=20)",
        "CosineAnnealingLR/eta_min": "s.CosineAnnealingLR(o, T_max=23, eta_min=0.01)",
        "StepLR/plain": "s.StepLR(o, step_size=7, gamma=0.5)",
        "SequentialLR/warmup_cosine": "s.SequentialLR(o, [s.LinearLR(o, 0.1, total_iters=5), "
        "s.CosineAnnealingLR(o, 18)], [5])",
    }
    for name, call in made.items():
        r.add(
            f"schedule/{name}",
            f"learning_rates(steps, lr, lambda s, o: {call})",
            attributes=attributes,
        )
    r.add(
        "schedule/warmup_cosine",
        "[warmup_cosine(step, warmup, steps, lr, min_lr) for step in (0, 1, 9, 10, 11, 50, 99, 100, 150)]",
        attributes={"warmup": 10, "steps": 100, "lr": 1e-3, "min_lr": 1e-4},
        outputs=[f"step_{s}" for s in (0, 1, 9, 10, 11, 50, 99, 100, 150)],
        note="nanoGPT's schedule, at the steps that the outputs are named after",
    )


FAMILIES = (
    losses,
    norms,
    attention,
    optimizers,
    schedules,
)
