"""Cases of operations over dims: order, reductions, softmax, indexing, shapes, matrix products."""

from math import inf, nan

import torch

from golden_cases import boolean, f64, i64, normal

TIES = [[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [nan, 1.0, 7.0, nan], [-inf, inf, inf, 0.0]]


def ordering(r):
    x = {"x": f64(TIES)}
    for op in "max min".split():
        r.add(
            f"{op}/all",
            f"torch.{op}(x)",
            {"x": f64([[1, 3, 3], [3, 0, 0]])},
            grads="x",
            note="the gradient is shared evenly by equal elements",
        )
        r.add(
            f"{op}/dim",
            f"torch.{op}(x, dim)",
            x,
            {"dim": 1},
            ("values", "indices"),
            note="the first of equal elements; nan wins",
        )
        r.add(
            f"{op}/dim_gradient",
            f"torch.{op}(x, dim)",
            {"x": f64([[1, 3, 3], [0, 0, 3]])},
            {"dim": 1},
            ("values", "indices"),
            grads="x",
            note="the gradient goes to the element chosen",
        )
        r.add(
            f"a{op}/dim",
            f"torch.a{op}(x, dim)",
            {"x": f64([[1, 3, 3], [0, 0, 3]])},
            {"dim": 1},
            grads="x",
            note="the gradient is shared evenly by equal elements",
        )
        r.add(f"arg{op}/dim", f"torch.arg{op}(x, dim)", x, {"dim": 1})
        r.add(f"arg{op}/all", f"torch.arg{op}(x)", {"x": f64([[1, 3], [3, 1]])})
    r.add("aminmax/dim", "torch.aminmax(x, dim=dim)", x, {"dim": 0}, ("min", "max"))
    both = ("values", "indices")
    for descending in (False, True):
        tag = "descending" if descending else "ascending"
        r.add(
            f"sort/stable_{tag}",
            "torch.sort(x, stable=True, dim=dim, descending=descending)",
            {"x": f64([3, 1, 2, 1, 3, -0.0, 0.0, 2])},
            {"dim": 0, "descending": descending},
            both,
            grads="x",
        )
        r.add(
            f"sort/nan_{tag}",
            "torch.sort(x, stable=True, dim=dim, descending=descending)",
            x,
            {"dim": 1, "descending": descending},
            both,
            note="nan counts as the largest",
        )
        r.add(
            f"argsort/integers_{tag}",
            "torch.argsort(x, stable=True, dim=dim, descending=descending)",
            {"x": i64([[2, 1, 2], [0, 0, -1]])},
            {"dim": 1, "descending": descending},
        )
    distinct = {"x": f64([[4, 1, 3, 2, 5], [10, 50, 20, 40, 30]])}
    r.add(
        "topk/largest", "torch.topk(x, k, dim=dim)", distinct, {"k": 3, "dim": 1}, both, grads="x"
    )
    r.add(
        "topk/smallest",
        "torch.topk(x, k, dim=dim, largest=False)",
        distinct,
        {"k": 2, "dim": 1},
        both,
        grads="x",
    )
    r.add("topk/nan", "torch.topk(x, k).values", {"x": f64([1, nan, 3, inf, -inf])}, {"k": 3})
    r.add(
        "kthvalue/dim", "torch.kthvalue(x, k, dim)", distinct, {"k": 2, "dim": 1}, both, grads="x"
    )
    r.add(
        "median/even",
        "torch.median(x, dim)",
        {"x": f64([[4, 1, 3, 2], [9, 8, 7, 6]])},
        {"dim": 1},
        both,
        grads="x",
        note="the lower of the two in the middle",
    )
    r.add("median/nan", "torch.median(x)", {"x": f64([1, nan, 3])})
    edges = {"edges": f64([1, 3, 3, 5]), "x": f64([[0, 1, 3], [4, 5, 9]])}
    r.add("searchsorted/left", "torch.searchsorted(edges, x)", edges)
    r.add("searchsorted/right", "torch.searchsorted(edges, x, right=True)", edges)
    r.add(
        "unique/sorted",
        "torch.unique(x, return_inverse=True, return_counts=True)",
        {"x": i64([3, 1, 3, 2, 1])},
        outputs=("values", "inverse", "counts"),
    )


def reductions(r):
    for dim in (0, 1, -1):
        r.add(
            f"cumsum/dim_{dim}",
            "torch.cumsum(x, dim)",
            {"x": normal(3, 4)},
            {"dim": dim},
            grads="x",
        )
        r.add(
            f"cumprod/dim_{dim}",
            "torch.cumprod(x, dim)",
            {"x": normal(3, 4)},
            {"dim": dim},
            grads="x",
        )
    r.add(
        "cumprod/zeros",
        "torch.cumprod(x, dim)",
        {"x": f64([[2, 0, 3, 4], [0, 5, 0, 2], [1, 2, 3, 0]])},
        {"dim": 1},
        grads="x",
    )
    r.add(
        "cumsum/integers",
        "torch.cumsum(x, 0)",
        {"x": torch.tensor([200, 100], dtype=torch.uint8)},
        note="integers are summed in i64",
    )
    for op in "cummax cummin".split():
        r.add(
            f"{op}/ties",
            f"torch.{op}(x, dim)",
            {"x": f64([1, 3, 3, 2, nan, 5])},
            {"dim": 0},
            ("values", "indices"),
            note="the last of equal elements; nan stays",
        )
    r.add(
        "logcumsumexp/dim",
        "torch.logcumsumexp(x, dim)",
        {"x": f64([[-inf, 0, 1], [700, 710, 2]])},
        {"dim": 1},
    )
    r.add(
        "prod/zeros",
        "torch.prod(x, dim)",
        {"x": f64([[2, 0, 3], [0, 5, 0], [1, 2, 3]])},
        {"dim": 1},
        grads="x",
    )
    r.add("prod/all", "torch.prod(x)", {"x": normal(2, 3)}, grads="x")
    r.add("sum/bool", "torch.sum(x)", {"x": boolean([True, True, False])})
    r.add("sum/i32", "torch.sum(x)", {"x": torch.tensor([2147483647, 1], dtype=torch.int32)})
    r.add(
        "sum/dims",
        "torch.sum(x, dims, keepdim=True)",
        {"x": normal(2, 3, 4)},
        {"dims": [0, 2]},
        grads="x",
    )
    r.add("mean/dims", "torch.mean(x, dims)", {"x": normal(2, 3, 4)}, {"dims": [-1, 0]}, grads="x")
    empty = {"x": torch.zeros(0, 3, dtype=torch.float64)}
    for op in "sum prod mean any all logsumexp var".split():
        r.add(f"{op}/empty", f"torch.{op}(x, 0)", empty)
    for op in "var std".split():
        for correction in (0, 1, 2):
            r.add(
                f"{op}/correction_{correction}",
                f"torch.{op}(x, dim, correction=correction)",
                {"x": normal(3, 5)},
                {"dim": 1, "correction": correction},
                grads="x",
            )
        r.add(f"{op}/all", f"torch.{op}(x)", {"x": normal(2, 3)}, grads="x")
        r.add(f"{op}/one_element", f"torch.{op}(x)", {"x": f64([2.0])})
        r.add(f"{op}/far_from_zero", f"torch.{op}(x)", {"x": f64([1e9 + 1, 1e9 + 2, 1e9 + 4])})
    r.add("std/constant", "torch.std(x)", {"x": f64([2, 2, 2])}, grads="x")
    r.add(
        "var_mean/dim",
        "torch.var_mean(x, dim)",
        {"x": normal(3, 5)},
        {"dim": 1},
        ("var", "mean"),
        grads="x",
    )
    r.add(
        "logsumexp/infinities",
        "torch.logsumexp(x, dim)",
        {"x": f64([[-inf, -inf], [-inf, 1], [inf, 1], [800, 800], [nan, 1]])},
        {"dim": 1},
    )
    r.add(
        "logsumexp/gradient",
        "torch.logsumexp(x, dims)",
        {"x": normal(2, 3, 2)},
        {"dims": [0, 2]},
        grads="x",
    )
    r.add("nansum/dim", "torch.nansum(x, 1)", {"x": f64(TIES)})
    r.add("nanmean/dim", "torch.nanmean(x, 1)", {"x": f64(TIES)})
    r.add("count_nonzero/dim", "torch.count_nonzero(x, 1)", {"x": f64([[0, -0.0, 1], [nan, 2, 0]])})
    r.add("any/nan", "torch.any(x)", {"x": f64([0, nan])})
    r.add("all/dim", "torch.all(x, 1)", {"x": f64([[1, 2], [0, nan], [nan, 1]])})
    for order in (0, 1, 2, 3, inf, -inf):
        r.add(
            f"norm/{order}",
            f"torch.linalg.vector_norm(x, {order}, dim)",
            {"x": f64([[3, -4, 0], [1, 2, -2]])},
            {"dim": 1},
            grads="x",
        )
    r.add("norm/at_zero", "torch.linalg.vector_norm(x)", {"x": f64([0, 0])}, grads="x")


def softmaxes(r):
    rows = {
        "x": f64(
            [[1, 2, 3], [-inf, 0, 1], [-inf, -inf, -inf], [1000, 1001, 0], [inf, 1, 2], [nan, 0, 1]]
        )
    }
    for op in "softmax log_softmax".split():
        r.add(
            f"{op}/rows",
            f"torch.{op}(x, dim)",
            rows,
            {"dim": 1},
            note="a row of -inf, or one that holds +inf, has no softmax: nan",
        )
        r.add(
            f"{op}/gradient", f"torch.{op}(x, dim)", {"x": normal(3, 4, 2)}, {"dim": 1}, grads="x"
        )
        r.add(
            f"{op}/masked_gradient",
            f"torch.{op}(x, dim)",
            {"x": f64([[1, -inf, 3], [0, 0, -inf]])},
            {"dim": -1},
            grads="x" if op == "softmax" else "",
        )
    r.add("softmax/scalar", "torch.softmax(x, 0)", {"x": f64(3.0)}, grads="x")
    r.add(
        "softmax/dtype",
        "torch.softmax(x, 0, dtype=torch.float64)",
        {"x": torch.tensor([1.0, 2.0], dtype=torch.float32)},
    )


def indexing(r):
    index = i64([[0, 2, 2], [1, 0, 1]])
    r.add(
        "gather/dim_1",
        "torch.gather(x, dim, index)",
        {"x": normal(3, 4), "index": index},
        {"dim": 1},
        grads="x",
        note="index may be smaller than x",
    )
    r.add(
        "gather/dim_0",
        "torch.gather(x, dim, index)",
        {"x": normal(3, 4), "index": index},
        {"dim": 0},
        grads="x",
    )
    r.add(
        "scatter/dim_1",
        "torch.scatter(x, dim, index, src)",
        {"x": normal(3, 4), "index": i64([[0, 2, 3], [3, 0, 1]]), "src": normal(2, 3)},
        {"dim": 1},
        grads="x src",
    )
    r.add(
        "scatter/value",
        "torch.scatter(x, dim, index, value)",
        {"x": normal(3, 4), "index": index},
        {"dim": 1, "value": 9.0},
        grads="x",
    )
    r.add(
        "scatter_add/repeats",
        "torch.scatter_add(x, dim, index, src)",
        {"x": normal(3, 4), "index": index, "src": normal(2, 3)},
        {"dim": 1},
        grads="x src",
    )
    for reduce in "sum prod mean amax amin".split():
        for include_self in (True, False):
            r.add(
                f"scatter_reduce/{reduce}_{'with' if include_self else 'without'}_self",
                "torch.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)",
                {"x": normal(3, 4), "index": index, "src": normal(2, 3)},
                {"dim": 1, "reduce": reduce, "include_self": include_self},
                grads="x src",
            )
    r.add(
        "index_select/repeats",
        "torch.index_select(x, dim, index)",
        {"x": normal(3, 4), "index": i64([2, 0, 2, 2])},
        {"dim": 1},
        grads="x",
    )
    r.add(
        "index_add/alpha",
        "torch.index_add(x, dim, index, src, alpha=alpha)",
        {"x": normal(3, 2), "index": i64([0, 2, 0]), "src": normal(3, 2)},
        {"dim": 0, "alpha": 2.0},
        grads="x src",
    )
    r.add(
        "index_copy/rows",
        "torch.index_copy(x, dim, index, src)",
        {"x": normal(3, 2), "index": i64([2, 0]), "src": normal(2, 2)},
        {"dim": 0},
        grads="x src",
    )
    r.add(
        "index_fill/rows",
        "torch.index_fill(x, dim, index, value)",
        {"x": normal(3, 2), "index": i64([2, 0])},
        {"dim": 0, "value": -1.0},
        grads="x",
    )
    r.add(
        "index/pairs",
        "x[i, j]",
        {"x": normal(3, 4), "i": i64([[0], [2]]), "j": i64([1, 1, -1])},
        grads="x",
        note="index tensors broadcast; negative indices count from the end",
    )
    r.add(
        "index/gap",
        "x[i, :, j]",
        {"x": normal(3, 2, 4), "i": i64([0, 2]), "j": i64([1, 3])},
        grads="x",
        note="indices that are not adjacent put their dims first",
    )
    r.add(
        "index/mask",
        "x[mask]",
        {"x": normal(2, 3), "mask": boolean([[1, 0, 1], [0, 1, 0]])},
        grads="x",
    )
    r.add(
        "index_put/accumulate",
        "torch.index_put(x, (i,), src, accumulate=True)",
        {"x": normal(3), "i": i64([1, 1, 0]), "src": normal(3)},
        grads="x src",
    )
    r.add("slice/step", "x[1:7:3, ::2]", {"x": normal(8, 5)}, grads="x")
    r.add(
        "masked_fill/broadcast",
        "torch.masked_fill(x, mask, -inf)",
        {"x": normal(2, 3), "mask": boolean([True, False, True])},
        grads="x",
    )
    r.add(
        "masked_select/order",
        "torch.masked_select(x, mask)",
        {"x": normal(2, 3), "mask": boolean([[1, 0, 1], [0, 1, 0]])},
        grads="x",
    )
    r.add(
        "where/broadcast",
        "torch.where(c, a, b)",
        {"c": boolean([[True], [False]]), "a": normal(3), "b": normal(2, 1)},
        grads="a b",
    )
    r.add(
        "where/nan_not_taken",
        "torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x))",
        {"x": f64([-1, 0, 4])},
        grads="x",
        note="the known trap: nan flows from the branch not taken",
    )
    r.add(
        "take_along_dim/argsort",
        "torch.take_along_dim(x, torch.argsort(x, 1), 1)",
        {"x": normal(2, 4)},
        grads="x",
    )
    r.add("nonzero/nan", "torch.nonzero(x)", {"x": f64([[0, 1, nan], [-0.0, 0, 2]])})
    for offset in (-2, -1, 0, 1, 5):
        for op in "tril triu".split():
            r.add(
                f"{op}/offset_{offset}",
                f"torch.{op}(x, offset)",
                {"x": normal(2, 3, 4)},
                {"offset": offset},
                grads="x",
            )
    r.add(
        "diagonal/offset",
        "torch.diagonal(x, offset, 1, 2)",
        {"x": normal(2, 3, 4)},
        {"offset": 1},
        grads="x",
    )
    r.add("diag/build", "torch.diag(x, offset)", {"x": normal(3)}, {"offset": -1}, grads="x")
    r.add("one_hot/classes", "F.one_hot(x, num_classes)", {"x": i64([0, 2, 1])}, {"num_classes": 4})
    r.add(
        "embedding/padding_idx",
        "F.embedding(index, weight, padding_idx=padding_idx)",
        {"index": i64([[0, 1, 1], [3, 1, 0]]), "weight": normal(4, 3)},
        {"padding_idx": 1},
        grads="weight",
        note="the row is read as it is; only its gradient is zero",
    )
    r.add(
        "embedding/repeats",
        "F.embedding(index, weight)",
        {"index": i64([2, 2, 2, 0]), "weight": normal(4, 3)},
        grads="weight",
    )


def shapes(r):
    r.add("flip/dims", "torch.flip(x, [0, 2])", {"x": normal(2, 2, 3)}, grads="x")
    r.add("roll/dims", "torch.roll(x, (1, -2), (0, 1))", {"x": normal(2, 3)}, grads="x")
    r.add("roll/flat", "torch.roll(x, 2)", {"x": normal(2, 3)}, grads="x")
    r.add("repeat/more_dims", "x.repeat(2, 1, 3)", {"x": normal(2, 2)}, grads="x")
    r.add(
        "repeat_interleave/counts",
        "torch.repeat_interleave(x, counts, 0)",
        {"x": normal(3, 2), "counts": i64([1, 0, 2])},
        grads="x",
    )
    r.add("expand/minus_one", "x.expand(2, -1, 3)", {"x": normal(2, 1)}, grads="x")
    r.add("unfold/overlap", "x.unfold(0, 3, 2)", {"x": normal(8)}, grads="x")
    r.add("split/uneven", "torch.split(x, 2)", {"x": normal(5)}, outputs=("a", "b", "c"), grads="x")
    r.add(
        "chunk/fewer",
        "torch.chunk(x, 4)",
        {"x": normal(6)},
        outputs=("a", "b", "c"),
        grads="x",
        note="chunks are ceil-sized, so there may be fewer than asked for",
    )
    r.add(
        "tensor_split/uneven",
        "torch.tensor_split(x, 3)",
        {"x": normal(7)},
        outputs=("a", "b", "c"),
        grads="x",
    )
    r.add("cat/promotes", "torch.cat([a, b])", {"a": i64([1, 2]), "b": f64([0.5])})
    r.add("stack/dim", "torch.stack([a, b], -1)", {"a": normal(2), "b": normal(2)}, grads="a b")
    r.add(
        "pad/negative",
        "F.pad(x, (1, -1, 2, 0), value=7.0)",
        {"x": normal(2, 3)},
        grads="x",
        note="pairs run from the last dim; negative cuts",
    )
    for mode in "reflect replicate circular".split():
        r.add(
            f"pad/{mode}",
            "F.pad(x, (2, 1), mode=mode)",
            {"x": normal(1, 2, 4)},
            {"mode": mode},
            grads="x",
        )
    r.add("movedim/two", "torch.movedim(x, (0, 1), (2, 0))", {"x": normal(2, 3, 4)}, grads="x")
    r.add("arange/float", "torch.arange(0.0, 1.0, 0.1, dtype=torch.float64)")
    r.add("arange/negative_step", "torch.arange(5, -2, -2)")
    r.add("linspace/ends", "torch.linspace(-1, 1, 7, dtype=torch.float64)")
    r.add("linspace/one", "torch.linspace(3, 9, 1, dtype=torch.float64)")
    r.add("logspace/base", "torch.logspace(0, 3, 4, base=2.0, dtype=torch.float64)")
    r.add("eye/rectangular", "torch.eye(2, 4, dtype=torch.float64)")
    r.add(
        "meshgrid/ij",
        "torch.meshgrid(a, b, indexing='ij')",
        {"a": i64([1, 2]), "b": i64([3, 4, 5])},
        outputs=("x", "y"),
    )


def products(r):
    pairs = {
        "vector_vector": ((3,), (3,)),
        "matrix_vector": ((2, 3), (3,)),
        "vector_matrix": ((3,), (3, 2)),
        "batch_vector": ((2, 4, 3), (3,)),
        "vector_batch": ((3,), (2, 3, 4)),
        "broadcast": ((2, 1, 3, 4), (5, 4, 2)),
        "empty": ((2, 0), (0, 3)),
    }
    for name, (a, b) in pairs.items():
        r.add(
            f"matmul/{name}", "torch.matmul(a, b)", {"a": normal(*a), "b": normal(*b)}, grads="a b"
        )
    r.add(
        "linear/bias",
        "F.linear(x, weight, bias)",
        {"x": normal(2, 3, 4), "weight": normal(5, 4), "bias": normal(5)},
        grads="x weight bias",
    )
    r.add(
        "baddbmm/scales",
        "torch.baddbmm(c, a, b, beta=0.5, alpha=2.0)",
        {"c": normal(2, 3, 5), "a": normal(2, 3, 4), "b": normal(2, 4, 5)},
        grads="a b c",
    )
    r.add(
        "addmm/beta_zero",
        "torch.addmm(c, a, b, beta=0.0)",
        {"c": f64([[nan, inf], [nan, 1]]), "a": normal(2, 3), "b": normal(3, 2)},
        note="beta 0 ignores c, nan included",
    )
    for equation in (
        "ij,jk->ki",
        "bij,bjk->bik",
        "i,j->ij",
        "bhtd,bhsd->bhts",
        "ii->i",
        "ij->",
        "ij,ij->i",
    ):
        sizes = {"i": 3, "j": 2, "k": 4, "b": 2, "h": 2, "t": 3, "s": 2, "d": 2}
        operands = equation.split("->")[0].split(",")
        names = "ab"[: len(operands)]
        inputs = {n: normal(*(sizes[c] for c in o)) for n, o in zip(names, operands)}
        r.add(
            f"einsum/{equation}",
            f"torch.einsum(equation, {', '.join(names)})",
            inputs,
            {"equation": equation},
            grads=" ".join(names),
        )


FAMILIES = (
    ordering,
    reductions,
    softmaxes,
    indexing,
    shapes,
    products,
)
