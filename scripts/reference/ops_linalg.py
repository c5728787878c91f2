"""Cases of linear algebra: factorisations, triangular systems, norms of matrices, einsum's notation."""

from math import inf

import torch

from golden_cases import Random, normal


def positive(*shape):
    """Symmetric positive-definite matrices."""

    def draw(g):
        x = torch.randn(shape, generator=g, dtype=torch.float64)
        return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64)

    return Random(draw)


def dominant(*shape):
    """Square matrices with a diagonal that keeps both triangles far from singular."""

    def draw(g):
        x = torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1
        return x + 3 * torch.eye(shape[-1], dtype=torch.float64)

    return Random(draw)


def factorisations(r):
    for name, shape in {"one": (4, 4), "batch": (2, 3, 3, 3)}.items():
        r.add(f"cholesky/{name}", "torch.linalg.cholesky(a)", {"a": positive(*shape)}, grads="a")
    r.add(
        "cholesky/upper",
        "torch.linalg.cholesky(a, upper=True)",
        {"a": positive(3, 3)},
        grads="a",
    )
    for name, shape in {"square": (3, 3), "tall": (2, 5, 3), "wide": (2, 3, 5)}.items():
        r.add(f"qr/{name}", "torch.linalg.qr(a)", {"a": normal(*shape)}, {}, ("q", "r"), grads="a")
        # A loss through u and vh must not depend on their signs, and PyTorch checks that: squares do not.
        r.add(
            f"svd/{name}",
            "(lambda f: (f.U**2, f.S, f.Vh**2))(torch.linalg.svd(a, full_matrices=False))",
            {"a": normal(*shape)},
            {},
            ("u_squared", "s", "vh_squared"),
            grads="a",
        )
        r.add(f"svdvals/{name}", "torch.linalg.svdvals(a)", {"a": normal(*shape)}, grads="a")


def systems(r):
    for upper in (False, True):
        for left in (False, True):
            for unit in (False, True):
                name = "_".join(
                    ("upper" if upper else "lower", "left" if left else "right")
                    + (("unit",) if unit else ())
                )
                r.add(
                    f"solve_triangular/{name}",
                    "torch.linalg.solve_triangular(a, b, upper=upper, left=left, unitriangular=unitriangular)",
                    {"a": dominant(2, 3, 3), "b": normal(*((2, 3, 4) if left else (2, 4, 3)))},
                    {"upper": upper, "left": left, "unitriangular": unit},
                    grads="a b",
                    note="the other triangle is not read",
                )
    r.add(
        "solve_triangular/broadcast",
        "torch.linalg.solve_triangular(a, b, upper=upper, left=left, unitriangular=unitriangular)",
        {"a": dominant(2, 1, 3, 3), "b": normal(4, 3, 2)},
        {"upper": True, "left": True, "unitriangular": False},
        grads="a b",
    )


def norms(r):
    orders = {"1": 1, "-1": -1, "2": 2, "-2": -2, "inf": inf, "-inf": -inf, "fro": "fro", "nuc": "nuc"}
    for name, order in orders.items():
        r.add(
            f"matrix_norm/{name}",
            f"torch.linalg.matrix_norm(a, {order!r})",
            {"a": normal(2, 3, 4)},
            grads="a",
        )
    r.add(
        "matrix_norm/dims",
        "torch.linalg.matrix_norm(a, 1, dim=dims, keepdim=True)",
        {"a": normal(3, 2, 4)},
        {"dims": [2, 0]},
        grads="a",
    )


def notation(r):
    for equation, shapes in (
        ("ij,jk", ((3, 2), (2, 4))),
        ("ba", ((3, 2),)),
        ("Ba,ab", ((3, 2), (2, 4))),
        ("ii", ((3, 3),)),
        ("...ij,...jk->...ik", ((5, 1, 3, 2), (4, 2, 3))),
        ("i...,...j->ij...", ((3, 2, 4), (4, 2))),
        ("...i->i", ((2, 3, 4),)),
        ("...i,...i", ((2, 3, 4), (3, 4))),
        ("ij,ij->ij", ((1, 4), (3, 1))),
        ("...ii->...i", ((2, 3, 3),)),
        ("bij,jk,bkl->bil", ((2, 3, 4), (4, 2), (2, 2, 3))),
    ):
        names = "abc"[: len(shapes)]
        r.add(
            f"einsum/{equation}",
            f"torch.einsum(equation, {', '.join(names)})",
            {n: normal(*s) for n, s in zip(names, shapes)},
            {"equation": equation},
            grads=" ".join(names),
        )


FAMILIES = (factorisations, systems, norms, notation)
