#!/usr/bin/env python3
"""Prints the tables of core/ops/functors/pieces.h: polynomials of degree 6 for sixteen pieces of a smooth function.

Method: for each piece the minimax polynomial, its coefficients rounded one at a time (make_math_coefficients.py); then a
search among coefficients a few units away for those with which the float32 evaluation itself, up to the result of the
functor, is best at 3000 points (the random numbers are fixed, so the tables are always the same).

Needs mpmath and numpy; a minute a table. Usage: make_activation_tables.py [NAME...]
"""
import sys

import numpy as np
from make_math_coefficients import f32, remez
from mpmath import mp, mpf

mp.dps = 40
F = np.float32
DEGREE, POINTS = 6, 3000


def fma(a, b, c):
    return F(a.astype(np.float64) * b + np.float64(c))


def unit_in_last_place(v):
    return np.ldexp(1.0, np.maximum(np.frexp(v)[1], -125) - 24)


def minimax(f, weight, lo, hi):
    """Coefficients of d^0 .. d^DEGREE, rounded to float32 one at a time."""
    powers, fixed = list(range(DEGREE + 1)), []
    coefs, _ = remez(f, weight, lo, hi, powers, grid=100)
    for i in powers:
        fixed.append(f32(coefs[0]))
        if i == DEGREE:
            return [F(float(c)) for c in fixed]
        left = lambda d, done=list(zip(fixed, powers)): f(d) - sum(c * d**p for c, p in done)
        try:
            coefs, _ = remez(left, weight, lo, hi, powers[i + 1:], grid=100)
        except ZeroDivisionError:  # a node at 0, where no power is left that matters
            coefs = coefs[1:]


def polished(coefs, d, cost, rng, rounds):
    def value(c):
        p = np.full(d.shape, c[-1], F)
        for k in range(DEGREE - 1, -1, -1):
            p = fma(p, d, c[k])
        return cost(p)

    best = value(coefs)
    for _ in range(rounds):
        trial = list(coefs)
        for _ in range(rng.integers(1, 4)):
            k = rng.integers(0, DEGREE + 1)
            step = int(rng.integers(-3, 4)) * (1 if k < 2 else 1 << int(rng.integers(0, 2 * k)))
            trial[k] = (np.array(trial[k], F).view(np.int32) + np.int32(step)).view(F)[()]
        new = value(trial)
        if new < best:
            best, coefs = new, trial
    return coefs


class Table:
    """Pieces around n * width of f(u) as polynomials of d = u - n * width - offset, minimax for `weight`.

    results: pairs of what the functor makes of f(u) and u, and the exact result, in doubles. Their errors count in units in
    the last place divided by the bound that they are to keep, or absolutely by `absolute(u)` where that is less.
    above: the values of f that pieces from `pieces` on have.
    mended: coefficients of pieces of which the search at POINTS points leaves a float beyond the bound, searched for at
    all floats where that is so.
    """

    def __init__(self, f, weight, width, offset, pieces, results, bounds, absolute=None, above=0.0, mended={}):
        self.f, self.weight, self.width, self.offset, self.pieces = f, weight, mpf(width), mpf(offset), pieces
        self.results, self.bounds, self.absolute, self.above, self.mended = results, bounds, absolute, above, mended

    def coefficients(self, n, rng, rounds=9000):
        middle = n * self.width
        centre, shift = middle + self.offset, F(float(self.width * 12582912))
        lo, hi = max(mpf(0), middle - self.width / 2) - centre, self.width / 2 - self.offset
        coefs = minimax(lambda d: self.f(centre + d), lambda d: self.weight(centre + d), lo, hi + mpf("1e-4"))
        u = np.unique(F(rng.uniform(float(max(centre + lo, mpf(2)**-12)), float(centre + hi), POINTS)))
        u = u[F(F(u + shift) - shift) == F(float(middle))]
        d = F(F(u - F(float(middle))) - F(float(self.offset)))
        wanted = [np.array([float(exact(mpf(float(v)))) for v in u]) for _, exact in self.results]

        def cost(p):
            worst = total = 0.0
            for (result, _), exact, bound in zip(self.results, wanted, self.bounds):
                error = np.abs(result(p, u).astype(np.float64) - exact)
                units = error / unit_in_last_place(exact) / bound
                if self.absolute:
                    units = np.minimum(units, error / self.absolute(u))
                worst, total = max(worst, units.max()), total + np.mean(units)
            return worst + 0.1 * total

        return polished(coefs, d, cost, rng, rounds)

    def rows(self):
        rng = np.random.default_rng(1)
        pieces = [self.coefficients(n, rng) for n in range(self.pieces)]
        for n, coefs in self.mended.items():
            pieces[n] = [F(c) for c in coefs]
        pieces += [[F(self.above)] + [F(0)] * DEGREE] * (16 - self.pieces)
        return zip(*pieces)


normal = lambda u: mp.erfc(u / mp.sqrt(2)) / 2
sigmoid = lambda u: 1 / (1 + mp.exp(u))  # of -u
linear, cubic = mpf("1.5957691216057308"), mpf("0.07135481627260025")
logistic = lambda u: sigmoid(linear * u + cubic * u**3)


def logistic_slope(u):
    s = logistic(u)
    return s - u * (linear + 3 * cubic * u * u) * s * (1 - s)


normal_slope = lambda u: normal(u) - u * mp.npdf(u)
below = lambda p, u: fma(-u, p, F(-0.0))
above = lambda p, u: fma(-u, p, u)
slopes = [lambda p, u: F(F(0) - p), lambda p, u: F(F(1) + p)]
one = lambda u: mpf(1)
tables = {
    "kSigmoid": Table(sigmoid, lambda u: 1 / sigmoid(u), 1, 0.5, 16,
                      [(lambda p, u: p, sigmoid), (lambda p, u: F(F(1) - p), lambda u: sigmoid(-u)),
                       (below, lambda u: -u * sigmoid(u)), (above, lambda u: u - u * sigmoid(u))], [2, 2, 4, 4]),
    "kNormalRoot": Table(lambda u: mp.sqrt(normal(u)), lambda u: 1 / mp.sqrt(normal(u)), 0.5, 0.25, 12,
                         [(lambda p, u: fma(-F(u * p), p, F(-0.0)), lambda u: -u * normal(u)),
                          (lambda p, u: fma(-F(u * p), p, u), lambda u: u - u * normal(u))], [4, 4],
                         mended={7: [0.00940304622, -0.0187490564, 0.0164612997, -0.00800226163, 0.00202202774, -0.000163203396, -0.000212004044],
                                 9: [0.00100850547, -0.00249354285, 0.00283953873, -0.00194036914, 0.00085822941, -0.000245648203, 1.9681318e-5]}),
    "kNormalSlope": Table(lambda u: -normal_slope(u), one, 0.5, 0, 15,
                          list(zip(slopes, [normal_slope, lambda u: 1 - normal_slope(u)])), [4, 4], lambda u: 2.0**-22, 1e-37),
    "kLogistic": Table(logistic, lambda u: u if u > 2 else 1 / logistic(u), 0.5, 0, 15,
                       [(below, lambda u: -u * logistic(u)), (above, lambda u: u - u * logistic(u))], [4, 4],
                       lambda u: np.where(u > 2, 2.0**-24, 1e-300)),
    "kLogisticSlope": Table(lambda u: -logistic_slope(u), one, 0.5, 0, 15,
                            list(zip(slopes, [logistic_slope, lambda u: 1 - logistic_slope(u)])), [4, 4], lambda u: 2.0**-22, 1e-37),
}


def text(c):
    digits = mp.nstr(mpf(float(c)), 9)
    return "0.0f" if c == 0 else digits + ("f" if "." in digits or "e" in digits else ".0f")


if __name__ == "__main__":
    for name in sys.argv[1:] or tables:
        print(f"TESSERA_TABLE Pieces<{DEGREE}> {name} = {{{{")
        for row in tables[name].rows():
            print("    {{" + ", ".join(text(c) for c in row) + "}},")
        print("}};")
