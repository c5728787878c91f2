#!/usr/bin/env python3
"""Prints the minimax coefficients used in core/ops/functors/*.h.

Method: Remez exchange on a dense grid in 50-digit arithmetic (Remez 1934; Muller, "Elementary Functions", 3rd ed.,
chapter 3), with a weight that makes the error relative to the final result. Coefficients are rounded to float32 one at a
time, the most significant first, and the rest are fitted again after each (Brisebarre, Muller, Tisserand, "Computing
machine-efficient polynomial approximations", 2006, gives the reason why: rounding all at once loses several bits).

Needs mpmath. Usage: make_math_coefficients.py [NAME...]
"""
import struct
import sys

from mpmath import mp, mpf

mp.dps = 50


def f32(x):
    """Nearest float32 of x, exactly."""
    return mpf(struct.unpack("f", struct.pack("f", float(x)))[0])


def remez(f, weight, lo, hi, powers, grid=401):
    """Minimises max |weight(x) * (sum c_i x^powers_i - f(x))|. Returns (coefficients, error)."""
    n = len(powers)
    xs = [(lo + hi) / 2 - (hi - lo) / 2 * mp.cos(mp.pi * i / grid) for i in range(grid + 1)]
    fx = [f(x) for x in xs]
    wx = [abs(weight(x)) for x in xs]
    basis = [[x**p for p in powers] for x in xs]
    nodes = [round(grid * (i + 0.5) / (n + 1)) for i in range(n + 1)]
    best = None
    for _ in range(40):
        a = mp.matrix(n + 1, n + 1)
        b = mp.matrix(n + 1, 1)
        for r, i in enumerate(nodes):
            for c in range(n):
                a[r, c] = basis[i][c] * wx[i]
            a[r, n] = (-1) ** r
            b[r] = fx[i] * wx[i]
        sol = mp.lu_solve(a, b)
        coefs, level = [sol[i] for i in range(n)], abs(sol[n])
        err = [wx[i] * (sum(c * v for c, v in zip(coefs, basis[i])) - fx[i]) for i in range(grid + 1)]
        peaks = []  # the largest error of each run of equal sign
        for i, e in enumerate(err):
            if peaks and (err[peaks[-1]] > 0) == (e > 0):
                if abs(e) > abs(err[peaks[-1]]):
                    peaks[-1] = i
            else:
                peaks.append(i)
        worst = max(abs(e) for e in err)
        if best is None or worst < best[1]:
            best = coefs, worst
        if len(peaks) < n + 1 or worst <= level * mpf("1.001"):
            break
        while len(peaks) > n + 1:
            peaks.pop(0 if abs(err[peaks[0]]) < abs(err[peaks[-1]]) else -1)
        nodes = peaks
    return best


def rounded(f, weight, lo, hi, powers, exact=False):
    """Remez, then rounding one coefficient at a time, lowest power first. exact: keep double precision."""
    coefs, worst = remez(f, weight, lo, hi, powers)
    if exact:
        return [mpf(float(c)) for c in coefs], worst
    fixed = []
    for i in range(len(powers)):
        fixed.append(f32(coefs[0]))
        rest = powers[i + 1:]
        if not rest:
            break
        done = list(zip(fixed, powers))
        g = lambda x, done=done: f(x) - sum(c * x**p for c, p in done)
        coefs, worst = remez(g, weight, lo, hi, rest)
    return fixed, worst


def limit(g, at_zero):
    return lambda x: g(x) if abs(x) > mpf("1e-12") else mpf(at_zero)


ln2 = mp.log(2)
s0 = mp.sqrt(mp.pi)


def of_square(g, at_zero):
    """Odd function x + x^3 P(x^2) (or even): g takes z = x^2."""
    return limit(g, at_zero)


# name: (target P, weight of its error, low end, high end, number of coefficients, double?)
tables = {
    # exp(r) = 1 + r + r^2 P(r)
    "exp": (limit(lambda r: (mp.expm1(r) - r) / r**2, 0.5), lambda r: r**2 / mp.exp(r), -ln2, ln2, 7, False),
    # the same for |r| <= ln(2) / 2, in gelu_far
    "exp_of_square": (limit(lambda r: (mp.expm1(r) - r) / r**2, 0.5), lambda r: r**2 / mp.exp(r), -ln2 / 2 * mpf("1.01"), ln2 / 2 * mpf("1.01"), 5, False),
    # exp(r) = 1 + r + P r^2 + r^3 / 6 for |r| <= ln(2) / 32; with the table below
    "exp_by_table": (limit(lambda r: (mp.expm1(r) - r - r**3 / 6) / r**2, 0.5), lambda r: r**2, mpf(0), ln2 / 32, 1, False),
    # exp(r) - 1 = r + r^2 P(r)
    "expm1": (limit(lambda r: (mp.expm1(r) - r) / r**2, 0.5), limit(lambda r: r**2 / mp.expm1(r), 0), -ln2 / 2 * 1.01, ln2 / 2 * 1.01, 5, False),
    # 2^r = 1 + r P(r)
    "exp2": (limit(lambda r: (2**r - 1) / r, ln2), lambda r: r / 2**r, mpf(-1), mpf(1), 8, False),
    # log(1 + f) = f - f^2/2 + f^3 P(f)
    "log": (limit(lambda f: (mp.log1p(f) - f + f * f / 2) / f**3, mpf(1) / 3), limit(lambda f: f**3 / mp.log1p(f), 0), mpf(-1) / 3, mpf(1) / 3, 8, False),
    # log2(m) = s P(s^2), s = (m - 1) / (m + 1), in double for pow
    "log2_double": (limit(lambda z: mp.log((1 + mp.sqrt(z)) / (1 - mp.sqrt(z))) / mp.sqrt(z) / ln2, 2 / ln2), lambda z: mpf(1), mpf(0), mpf("0.0401"), 7, True),
    # 2^r in double, |r| <= 1/2
    "exp2_double": (lambda r: 2**r, lambda r: 2**-r, mpf(-1) / 2, mpf(1) / 2, 9, True),
    # sinh(x) = x + x^3 P(x^2), |x| <= 2.2
    "sinh": (of_square(lambda z: (mp.sinh(mp.sqrt(z)) / mp.sqrt(z) - 1) / z, mpf(1) / 6), limit(lambda z: z * mp.sqrt(z) / mp.sinh(mp.sqrt(z)), 0), mpf(0), mpf("4.84"), 6, False),
    # tanh(x) = x + x^3 P(x^2), |x| <= 0.55
    "tanh": (of_square(lambda z: (mp.tanh(mp.sqrt(z)) / mp.sqrt(z) - 1) / z, mpf(-1) / 3), limit(lambda z: z * mp.sqrt(z) / mp.tanh(mp.sqrt(z)), 0), mpf(0), mpf("0.3025"), 5, False),
    # sin(x) = x + x^3 P(x^2), cos(x) = 1 - x^2/2 + x^4 P(x^2), tan(x) = x + x^3 P(x^2), |x| <= pi/4
    "sin": (of_square(lambda z: (mp.sin(mp.sqrt(z)) / mp.sqrt(z) - 1) / z, mpf(-1) / 6), limit(lambda z: z * mp.sqrt(z) / mp.sin(mp.sqrt(z)), 0), mpf(0), mpf("0.6175"), 3, False),
    "cos": (of_square(lambda z: (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2, mpf(1) / 24), lambda z: z**2 / mp.cos(mp.sqrt(z)), mpf(0), mpf("0.6175"), 3, False),
    "tan": (of_square(lambda z: (mp.tan(mp.sqrt(z)) / mp.sqrt(z) - 1) / z, mpf(1) / 3), limit(lambda z: z * mp.sqrt(z) / mp.tan(mp.sqrt(z)), 0), mpf(0), mpf("0.6175"), 7, False),
    # asin(x) = x + x^3 P(x^2), |x| <= 1/2
    "asin": (of_square(lambda z: (mp.asin(mp.sqrt(z)) / mp.sqrt(z) - 1) / z, mpf(1) / 6), limit(lambda z: z * mp.sqrt(z) / mp.asin(mp.sqrt(z)), 0), mpf(0), mpf("0.25"), 5, False),
    # atan(x) = x + x^3 P(x^2), |x| <= 1
    "atan": (of_square(lambda z: (mp.atan(mp.sqrt(z)) / mp.sqrt(z) - 1) / z, mpf(-1) / 3), limit(lambda z: z * mp.sqrt(z) / mp.atan(mp.sqrt(z)), 0), mpf(0), mpf(1), 9, False),
    # erf(x) = x P(x^2), |x| <= 1
    "erf": (of_square(lambda z: mp.erf(mp.sqrt(z)) / mp.sqrt(z) - 1, 2 / s0 - 1), limit(lambda z: mp.sqrt(z) / mp.erf(mp.sqrt(z)), s0 / 2), mpf(0), mpf(1), 7, False),
    # erf(a) = 1 - exp(P(a)), 1 <= a <= 4
    "erf_tail": (lambda a: mp.log(mp.erfc(a)), lambda a: mp.erfc(a) / mp.erf(a), mpf(1), mpf(4), 7, False),
    # exp(r) = 1 + r P(r), for the tail of erf
    "exp_tail": (limit(lambda r: mp.expm1(r) / r, 1), lambda r: r / mp.exp(r), -ln2 / 2 * 1.01, ln2 / 2 * 1.01, 5, False),
}
# (1 + 2 a) exp(a^2) erfc(a) = P(q), q = 1 / (1 + 13/32 a), 1/2 <= a <= 10.2. Nearly constant, so well conditioned.
# (Shepherd, Laframboise 1981, "Chebyshev approximation of (1+2x)exp(x^2)erfc(x) in 0<=x<inf", Math. Comp. 36.)
erfcx = lambda a: mp.exp(a * a) * mp.erfc(a)


def tail(p, factor, g, lo, hi, n):
    """factor(a, q) g(a) of q = 1 / (1 + p a)."""
    f = lambda q: factor((1 / q - 1) / p, q) * g((1 / q - 1) / p)
    return f, lambda q: 1 / f(q), 1 / (1 + p * mpf(hi)), 1 / (1 + p * mpf(lo)), n, False


tables["erfc_tail"] = tail(mpf(13) / 32, lambda a, q: 1 + 2 * a, erfcx, "0.499", "10.2", 10)
# exp(u^2 / 2) Phi(-u) = q P(q), q = 1 / (1 + 9/32 u), 0 <= u <= 14.4
tables["normal_tail"] = tail(mpf(9) / 32, lambda u, q: 1 / q, lambda u: erfcx(u / mp.sqrt(2)) / 2, "0", "14.4", 10)
# Phi(-u) - u phi(u) = exp(-u^2 / 2) P(u), absolutely, 0 <= u <= 6: the weight falls so fast that a polynomial does.
tables["normal_slope"] = (lambda u: erfcx(u / mp.sqrt(2)) / 2 - u / mp.sqrt(2 * mp.pi), lambda u: mp.exp(-u * u / 2), mpf(0), mpf(6), 12, False)


# name: words of a table. Bits of 2^(j / 16) less j 2^19.
words = {"exp_by_table": [struct.unpack("I", struct.pack("f", 2 ** (j / 16)))[0] - (j << 19) for j in range(16)]}


def main():
    for name in sys.argv[1:] or tables:
        f, w, lo, hi, n, exact = tables[name]
        coefs, worst = rounded(f, w, lo, hi, list(range(n)), exact)
        print(f"{name}: relative error {mp.nstr(worst, 3)} = 2^{mp.nstr(mp.log(worst, 2), 4)}")
        for c in coefs:
            print(f"  {float(c)!r}" if exact else f"  {mp.nstr(c, 9)}f")
        for word in words.get(name, []):
            print(f"  0x{word:08x}")


if __name__ == "__main__":
    main()
