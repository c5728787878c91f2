// Sums and other reductions, joins, and updates of parameters.
#include "core/autograd/autograd.h"
#include "core/ops/bits_hash.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/large_cases.h"

namespace tessera::test {
namespace {

using List = std::vector<Tensor>;

void add_all_reductions(LargeCases& cases, const Shape& shape, const Dims& dims) {
  int64_t length = 1;
  for (int d = 0; d < shape.size(); ++d)
    if (dims.empty() || std::find(dims.begin(), dims.end(), d) != dims.end()) length *= shape[d];
  const std::string of = " of " + to_string(shape) + " over " + to_string(dims);
  const Tensor x = grid_values(shape, 1);
  cases.push_back(
      {"sum" + of, {x}, [=](const List& in) { return List{sum(in[0], dims)}; }, length});
  LargeCase largest{"amax" + of, {x}, [=](const List& in) { return List{amax(in[0], dims)}; }};
  LargeCase least{"amin" + of, {x}, [=](const List& in) { return List{amin(in[0], dims)}; }};
  largest.ties = least.ties = true;
  cases.push_back(std::move(largest)), cases.push_back(std::move(least));
  // Only a few places are not what most are.
  const Tensor flags = gt(x, 0.98);
  cases.push_back({"any" + of, {flags}, [=](const List& in) { return List{any(in[0], dims)}; }});
  cases.push_back(
      {"all" + of, {logical_not(flags)}, [=](const List& in) { return List{all(in[0], dims)}; }});
  const Tensor counts = cast(x * 128.0, kI64);
  cases.push_back(
      {"sum of integers" + of, {counts}, [=](const List& in) { return List{sum(in[0], dims)}; }});
  if (length > 1100) return;  // products of more would leave the range of f16
  const Tensor near_one = grid_values(shape, 2, 0.99, 1.01);  // 127/128, 1, 129/128
  cases.push_back({"prod" + of,
                   {near_one},
                   [=](const List& in) { return List{prod(in[0], dims)}; },
                   length,
                   true,
                   0});
}

}  // namespace

void add_reductions(LargeCases& cases) {
  for (int64_t n : {4096, 70001})
    cases.push_back({"bits_hash of " + std::to_string(n),
                     {sample_integers({n}, -100, 100, 1)},
                     [](const List& in) { return List{bits_hash(in[0])}; },
                     1,
                     false});
  for (int64_t n : {31, 32, 33, 1023, 1024, 1025, 65535, 65536, 65537, 131073})
    add_all_reductions(cases, {n}, {});
  for (auto [n, inner] : {std::pair<int64_t, int64_t>{31, 255}, {32, 256}, {33, 257}, {300, 257}})
    add_all_reductions(cases, {n, inner}, {0});
  // Rows for two threads, and middle dims.
  for (int64_t rows : {61, 62, 63}) add_all_reductions(cases, {rows, 1025}, {1});
  add_all_reductions(cases, {3, 65537}, {1});
  add_all_reductions(cases, {3, 33, 65}, {1});
  add_all_reductions(cases, {17, 5, 67}, {0, 2});
  for (int64_t n : {32767, 32768, 32769})
    cases.push_back({"cat into a row of " + std::to_string(n),
                     {grid_values({n - 100}, 1), grid_values({100}, 2)},
                     [](const List& in) { return List{cat(in, 0)}; }});
  for (int64_t rows : {63, 64, 65})
    cases.push_back({"cat of rows " + std::to_string(rows),
                     {grid_values({rows, 1000}, 1), grid_values({rows, 24}, 2)},
                     [](const List& in) { return List{cat(in, 1)}; }});
}

namespace {

// Parameters, gradients and state of one optimizer, and what one step makes of them.
LargeCase update(const std::string& name, const std::vector<Shape>& shapes, size_t lists,
                 std::function<void(const std::vector<List>&)> step) {
  LargeCase c{name, {}, {}};
  for (size_t l = 0; l < lists; ++l)
    for (size_t i = 0; i < shapes.size(); ++i)  // the last list is a sum of squares
      c.in.push_back(grid_values(shapes[i], 1 + l * 10 + i, l == 3 ? 0 : -1));
  c.f = [=, n = shapes.size()](const List& in) {
    std::vector<List> all(lists);
    for (size_t i = 0; i < in.size(); ++i) all[i / n].push_back(clone(in[i]));
    step(all);
    List out;
    for (const List& l : all) out.insert(out.end(), l.begin(), l.end());
    return out;
  };
  c.gradients = false, c.roundings = 0, c.length = 4;
  return c;
}

Tensor number(double v) { return scalar_tensor(v, kF64); }

}  // namespace

void add_updates(LargeCases& cases) {
  const Tensor rate = number(0.01), steps = number(3), scale = number(0.5);
  const std::vector<std::vector<Shape>> sets = {
      {{32767}}, {{32768}}, {{32769}}, {{65537}}, {{5}, {33, 1001}, {1}, {70001}}};
  for (size_t i = 0; i < sets.size(); ++i) {
    const std::string of = " of set " + std::to_string(i);
    for (bool decoupled : {true, false})
      cases.push_back(
          update((decoupled ? "adamw" : "adam") + of, sets[i], 4, [=](const std::vector<List>& l) {
            adam_update_(l[0], l[1], l[2], l[3], rate, steps, scale,
                         {.weight_decay = 0.1, .decoupled = decoupled});
          }));
    cases.push_back(update("sgd with momentum" + of, sets[i], 3, [=](const std::vector<List>& l) {
      sgd_update_(l[0], l[1], l[2], rate, scale,
                  {.momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
    }));
    cases.push_back(update("sgd" + of, sets[i], 2, [=](const std::vector<List>& l) {
      sgd_update_(l[0], l[1], {}, rate, scale, {});
    }));
  }
  auto norms = [&](const Shape& shape, int64_t length) {
    cases.push_back({"norms of " + to_string(shape),
                     {grid_values(shape, 1), grid_values({7}, 2)},
                     [](const List& in) {
                       const Tensor rows[] = {row_squares(in[0]), row_squares(in[1])};
                       return List{global_norm(in), max_magnitude(in), rows[0], norm_of_rows(rows)};
                     },
                     length,
                     false,
                     0});
  };
  for (int64_t n : {4095, 4096, 4097, 8193}) norms({3, n}, 3 * n);
  for (int64_t n : {65535, 65536, 65537}) norms({n}, n);
  for (int64_t rows : {1023, 1024, 1025}) norms({rows, 3}, 3 * rows);
}

}  // namespace tessera::test
