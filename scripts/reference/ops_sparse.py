"""Cases of reductions over pieces: segments of a dim, rows of a sparse matrix."""

from golden_cases import i64, normal


def segments(r):
    for reduce in "sum mean max min prod".split():
        r.add(
            f"segment_reduce/{reduce}",
            "torch.segment_reduce(x, reduce, offsets=offsets)",
            {"x": normal(6, 3), "offsets": i64([0, 2, 2, 6])},
            {"reduce": reduce},
            grads="x",
            note="the second segment is empty",
        )
    r.add(
        "segment_reduce/lengths",
        "torch.segment_reduce(x, reduce, lengths=lengths)",
        {"x": normal(6), "lengths": i64([1, 3, 2])},
        {"reduce": "sum"},
        grads="x",
    )


def products(r):
    for reduce in "sum mean amax amin".split():
        r.add(
            f"spmm_reduce/{reduce}",
            "torch.sparse.mm(torch.sparse_csr_tensor(crow, col, values, (4, 5)), dense, reduce)",
            {
                "crow": i64([0, 3, 3, 4, 7]),
                "col": i64([0, 1, 4, 2, 1, 3, 4]),
                "values": normal(7),
                "dense": normal(5, 3),
            },
            {"reduce": reduce},
            grads="values dense",
            note="the second row is empty",
        )


FAMILIES = (segments, products)
