// Golden cases of linear algebra and of einsum's notation.
#include <gtest/gtest.h>

#include <limits>

#include "core/ops/einsum.h"
#include "core/ops/linalg.h"
#include "core/ops/pointwise.h"
#include "tests/core/ops/golden.h"

namespace tessera::golden {
namespace {

using C = const Case&;
using List = std::vector<Tensor>;

Tensor einsum_of(C c) {
  List operands;
  for (const char* name : {"a", "b", "c"})
    if (c.has(name)) operands.push_back(c[name]);
  return einsum(c.text("equation"), operands);
}

Tensor matrix_norm_of(C c) {
  using linalg::matrix_norm;
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const std::string v = c.variant();
  if (v == "dims") return matrix_norm(c["a"], 1, c.dims("dims"), true);
  if (v == "fro") return matrix_norm(c["a"]);
  if (v == "nuc") return matrix_norm(c["a"], linalg::MatrixNorm::kNuclear);
  return matrix_norm(c["a"], v == "inf" ? kInf : v == "-inf" ? -kInf : std::stod(v));
}

}  // namespace

const Table& linalg_table() {
  static const Table table = {
      {"einsum", [](C c) { return List{einsum_of(c)}; }},
      {"cholesky", [](C c) { return List{linalg::cholesky(c["a"], c.variant() == "upper")}; }},
      {"solve_triangular",
       [](C c) {
         return List{linalg::solve_triangular(c["a"], c["b"],
                                              {.upper = c.flag("upper"),
                                               .left = c.flag("left"),
                                               .unitriangular = c.flag("unitriangular")})};
       }},
      {"qr",
       [](C c) {
         linalg::QR f = linalg::qr(c["a"]);
         return List{f.q, f.r};
       }},
      {"svd",
       [](C c) {
         linalg::SVD f = linalg::svd(c["a"]);
         return List{square(f.u), f.s, square(f.vh)};
       }},
      {"svdvals", [](C c) { return List{linalg::svdvals(c["a"])}; }},
      {"matrix_norm", [](C c) { return List{matrix_norm_of(c)}; }},
  };
  return table;
}

TEST(Golden, Linalg) { check_all(linalg_table()); }

}  // namespace tessera::golden
