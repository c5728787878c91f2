// Products: odd extents beside every limit, all layouts of both operands, in a fixed tree too.
#include <optional>

#include "core/dispatch/dispatch.h"
#include "core/ops/contract.h"
#include "core/ops/contract_epilogues.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "tests/support/large_cases.h"

namespace tessera::test {
namespace {

using List = std::vector<Tensor>;

// a [m, k] and b [k, n], each as it is or the transpose of what lies in memory.
void add_product(LargeCases& cases, int64_t m, int64_t n, int64_t k, bool a_turned, bool b_turned,
                 bool exact) {
  auto as_shape = [](const Tensor& t, bool turned) { return turned ? transpose(t, 0, 1) : t; };
  LargeCase c{
      fmt::format("product of {} x {} x {}{}{}{}", m, k, n, a_turned ? ", a transposed" : "",
                  b_turned ? ", b transposed" : "", exact ? ", in a fixed tree" : ""),
      {grid_values(a_turned ? Shape{k, m} : Shape{m, k}, 1),
       grid_values(b_turned ? Shape{n, k} : Shape{k, n}, 2)},
      [=](const List& in) {
        std::optional<ExactContraction> scope;
        if (exact) scope.emplace();
        return List{matmul(as_shape(in[0], a_turned), as_shape(in[1], b_turned))};
      },
      std::max({m, n, k})};
  c.part = 61;
  cases.push_back(std::move(c));
}

// One row of `every` is not zero, as in the gradient of a loss that ignores most of its targets.
void add_zero_rows(LargeCases& cases, int64_t m, int64_t n, int64_t k, int64_t every = 5) {
  Tensor a = grid_values({m, k}, 1);
  for (int64_t r = 0; r < m; ++r)
    if (r % every != 2) std::fill_n(a.data<double>() + r * k, k, 0.0);
  LargeCase c{fmt::format("product of {} x {} x {}, most rows zero", m, k, n),
              {a, grid_values({k, n}, 2)},
              [](const List& in) { return List{matmul(in[0], in[1])}; },
              k};
  c.gradients = false, c.part = 509;
  cases.push_back(std::move(c));
}

}  // namespace

void add_products(LargeCases& cases) {
  for (bool a : {false, true})
    for (bool b : {false, true}) {
      for (bool exact : {false, true}) {
        add_product(cases, 63, 100, 160, a, b, exact);
        add_product(cases, 64, 129, 64, a, b, exact);
        add_product(cases, 65, 257, 65, a, b, exact);
        add_product(cases, 1, 67, 33, a, b, exact);
        add_product(cases, 67, 1, 33, a, b, exact);
        add_product(cases, 9, 15, 1, a, b, exact);
        add_product(cases, 5, 31, 7, a, b, exact);
        add_product(cases, 6, 33, 9, a, b, exact);
        add_product(cases, 7, 31, 5, a, b, exact);
        add_product(cases, 8, 32, 8, a, b, exact);
        add_product(cases, 9, 33, 17, a, b, exact);
      }
      // Large enough for packed panels, and odd beside each of their limits.
      add_product(cases, 65, 255, 1100, a, b, false);
      add_product(cases, 64, 256, 1100, a, b, false);
      add_product(cases, 130, 257, 1031, a, b, false);
      add_product(cases, 200, 641, 300, a, b, false);
      for (int64_t k : {767, 768, 769}) add_product(cases, 64, 250, k, a, b, false);
    }
  // Leaves as deep as what is packed of them at a time, where rows of A come in sixes and in
  // eights.
  for (int64_t depth : {768, 1024})
    for (int64_t k : {depth - 1, depth, depth + 1})
      add_product(cases, 7, 9, kExactLeaves * k, true, false, true);
  add_product(cases, 189, 19, 73, false, false, false);  // 2^18 - 1 products
  add_product(cases, 64, 64, 64, false, false, false);
  add_product(cases, 65, 37, 109, false, false, false);    // 2^18 + 1
  add_product(cases, 188, 213, 227, false, false, false);  // 2^17 - 1 elements of all three
  add_product(cases, 196, 200, 232, false, false, false);
  add_product(cases, 172, 217, 241, false, false, false);  // 2^17 + 1
  // As deep as half of the columns still fit, of 16-bit floats.
  for (int64_t k : {1534, 1536, 1538}) add_product(cases, 64, 270, k, false, false, false);
  add_zero_rows(cases, 73, 7, 262657);  // 2^27 - 1
  add_zero_rows(cases, 512, 512, 512);
  add_zero_rows(cases, 81, 19, 87211);  // 2^27 + 1
  for (int64_t rows : {15, 16, 17}) add_zero_rows(cases, rows, 70460, 112 + rows);
  for (int64_t rows : {31, 32, 33}) add_zero_rows(cases, rows, 4409, 1024);
  // Rows of b that threads look through, and rows of a that they copy: two grains of both.
  add_zero_rows(cases, 6 * 841, 819, 39, 6);
  add_zero_rows(cases, 6 * 818, 819, 40, 6);
  add_zero_rows(cases, 6 * 797, 819, 41, 6);
  auto spec = [&](const char* of, const Shape& a, const Shape& b, int64_t length) {
    cases.push_back({fmt::format("contract {}", of),
                     {grid_values(a, 1), grid_values(b, 2)},
                     [=](const List& in) { return List{contract(of, in[0], in[1])}; },
                     length});
  };
  spec("bthd,bshd->bhts", {2, 33, 3, 17}, {2, 35, 3, 17}, 66);
  spec("bhts,bshd->bthd", {2, 3, 33, 35}, {2, 35, 3, 17}, 66);
  spec("btn,btk->nk", {3, 67, 33}, {3, 67, 35}, 201);
  spec("ij,ij->i", {65, 300}, {65, 300}, 300);
  spec("i,j->ij", {300}, {65}, 300);
  cases.push_back({"linear with bias",
                   {grid_values({5, 27, 65}, 1), grid_values({129, 65}, 2), grid_values({129}, 3)},
                   [](const List& in) { return List{linear(in[0], in[1], in[2])}; },
                   135,
                   true,
                   2});
  cases.push_back({"a product that adds its bias",
                   {grid_values({5, 27, 65}, 1), grid_values({129, 65}, 2), grid_values({129}, 3)},
                   [](const List& in) {
                     ContractAttributes c;
                     c.parse("abk,nk->abn");
                     Tensor operands[] = {in[0], in[1], in[2]};
                     return List{dispatch1(contract_bias_op(c), operands)};
                   },
                   135,
                   true,
                   2});
  // What compiled steps on cards make; in 16 bits tests there compare them.
  const auto add = [&](const char* name, std::vector<Tensor> in, std::string spec, auto op) {
    ContractAttributes c;
    c.parse(spec);
    LargeCase made{name, std::move(in), [prim = op(c)](List list) {
                     const Tensors out = dispatch(prim, list);
                     return List(out.begin(), out.end());
                   }};
    made.length = 135, made.gradients = false, made.roundings = 0;
    cases.push_back(std::move(made));
  };
  const Tensor a = grid_values({5, 27, 65}, 1), w = grid_values({129, 65}, 2),
               of_result = grid_values({5, 27, 129}, 3);
  add("a product with its GELU", {a, w, grid_values({129}, 3)}, "abk,nk->abn", contract_gelu_op);
  add("a product in the gradient of GELU", {a, w, of_result}, "abk,nk->abn", contract_gelu_grad_op);
  add("a product that is wide", {a, w}, "abk,nk->abn", contract_wide_op);
  add("a product that is added", {a, w, of_result}, "abk,nk->abn", contract_add_op);
  add("a product that sums an operand", {grid_values({135, 65}, 1), grid_values({135, 129}, 2)},
      "km,kn->mn", [](const ContractAttributes& c) {
        ContractSumsAttributes sums;
        static_cast<ContractAttributes&>(sums) = c;
        sums.of_b = true;
        return contract_sums_op(sums);
      });
}

}  // namespace tessera::test
