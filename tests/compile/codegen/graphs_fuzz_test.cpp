// Random programs through the whole compiler: recorded, through the passes, as generated code, by
// an executor on one to three threads, and with the code of one size at others. Kernels are
// compared with the interpreter within the bounds of bounds.h, and whole graphs with the ops as
// they were recorded: bit by bit where the order of sums cannot matter. A failure prints its seed
// and the smallest part that shows it. tests/support/fuzz.h says how to run others.
#include <gtest/gtest.h>

#include <map>

#include "compile/codegen/sized.h"
#include "compile/debug/minimize.h"
#include "compile/run/executor.h"
#include "core/backend/cuda/library.h"
#include "core/base/parallel.h"
#include "tests/compile/codegen/bounds.h"
#include "tests/compile/codegen/compare.h"
#include "tests/compile/codegen/random_graphs.h"
#include "tests/compile/passes/close.h"
#include "tests/compile/passes/fuzz.h"
#include "tests/compile/passes/graphs.h"
#include "tests/support/fuzz.h"

namespace tessera::compiler {
namespace {

using test::FuzzSeeds;
using test::RandomProgram;
using test::run_again;

struct Case {
  uint64_t seed = 0;
  std::string what = {};
  Graph recorded = {}, fused = {};
  std::vector<Tensor> inputs = {};
  std::vector<bool> exact = {};  // by output
  bool state_exact = true;
};

void optimise(Graph& g, uint64_t seed) {
  if (seed % 4) decompose(g, {.softmax = seed % 3 != 0, .least_elements = 0});
  run_passes(g);
}

// Memory as it was before a program ran.
class Restored {
 public:
  explicit Restored(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const Tensor& t : tensors_) before_.push_back(test::copy_of(t));
  }
  ~Restored() {
    for (size_t i = 0; i < tensors_.size(); ++i)
      if (before_[i].storage() && before_[i].storage()->bytes())
        std::memcpy(tensors_[i].storage()->data(), before_[i].storage()->data(),
                    before_[i].storage()->bytes());
  }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;

 private:
  std::vector<Tensor> tensors_, before_;
};

std::string smallest(const Case& c);

Case case_of(uint64_t seed, int64_t size = 0) {
  Case c{.seed = seed};
  RandomProgram program(seed, size);
  std::vector<Tensor> state = program.state;
  state.push_back(program.generator.state());
  Restored before(state);
  c.inputs = test::copies(program.inputs);
  std::swap(c.inputs, program.inputs);
  c.recorded = c.fused = test::graph_of(program.inputs, [&] { return program.run(); });
  c.exact = program.exact, c.state_exact = program.state_exact();
  try {
    optimise(c.fused, seed);
  } catch (const std::exception& e) {
    ADD_FAILURE() << run_again(seed) << "size " << size << ": " << e.what() << "\n"
                  << to_string(c.recorded) << "smallest: " << smallest(c);
    c.fused = c.recorded;
  }
  c.what = run_again(seed) + fmt::format("size {}\n", size) + to_string(c.recorded) + "fused:\n" +
           to_string(c.fused);
  return c;
}

std::vector<const Fused*> kernels_of(const Graph& g) {
  std::vector<const Fused*> list;
  for (const Node& n : g.nodes)
    if (const Fused* f = as_fused(*n.prim)) list.push_back(f);
  return list;
}
void set_code(Graph& g, std::span<const Ref<const LoadedKernel>> code) {
  size_t k = 0;
  for (Node& n : g.nodes)
    if (const Fused* f = as_fused(*n.prim))
      n.prim = PrimRef(new Fused(f->name, f->body, f->results, code[k++]));
}

struct Seen {
  int64_t kernels = 0, bodies = 0, elements = 0, unknown = 0;
};

// Runs the nodes one by one, as interpret() does, but keeps all values. `visit` gets each
// node, its operands and a function that runs it.
template <class F>
Tensors walk(const Graph& g, std::span<const Tensor> inputs, F visit) {
  std::vector<Tensor> value(g.values.size());
  auto at = [&](ValueId id) -> Tensor& { return value[size_t(id)]; };
  for (size_t i = 0; i < inputs.size(); ++i) at(g.inputs[i]) = inputs[i];
  for (const ImplicitInput& i : g.implicit) at(i.id) = i.tensor;
  for (ValueId id : g.shapes) at(id) = Tensor(g[id].meta, nullptr);
  for (const Node& n : g.nodes) {
    Tensors in, out;
    for (ValueId id : n.in) in.push_back(at(id));
    visit(n, in, [&]() -> const Tensors& {
      if (n.into.empty()) return out = eager_backend().run(n.prim, in);
      for (size_t i = 0; i < n.into.size(); ++i)
        out.push_back(n.into[i] == kNoValue ? empty(g[n.out[i]].meta) : at(n.into[i]));
      eager_backend().assign(out, n.prim, in);
      return out;
    });
    for (size_t i = 0; i < n.out.size(); ++i) at(n.out[i]) = out[i];
  }
  Tensors outputs;
  for (ValueId id : g.outputs) outputs.push_back(at(id));
  return outputs;
}

// Runs each kernel on the operands that it has in the graph and checks it with the bounds of its
// body.
std::string check_kernels(const Graph& g, std::span<const Tensor> inputs, Seen& seen) {
  std::vector<Tensor> given = test::copies(inputs), outside_memory;
  for (const ImplicitInput& i : g.implicit) outside_memory.push_back(i.tensor);
  Restored before(outside_memory);
  std::string found;
  walk(g, given, [&](const Node& n, const Tensors& in, auto run) {
    const Fused* fused = as_fused(*n.prim);
    std::vector<test::Bounded> bounds;
    if (fused && found.empty()) bounds = test::bounds_of(fused->body, in), ++seen.kernels;
    const Tensors& out = run();
    for (size_t k = 0; k < bounds.size() && found.empty(); ++k) {
      std::string wrong =
          test::outside(fused->body, k, bounds[k], out[k], seen.unknown, seen.elements);
      if (!wrong.empty())
        found = fmt::format("{}: {}\n{}\n{}", fused->name, wrong, to_string(fused->body),
                            print_cpp(fused->body, "kernel"));
    }
  });
  return found;
}

template <class F>
Tensors results_of(const Graph& g, std::span<const Tensor> in, F run) {
  std::vector<Tensor> inputs = test::copies(in), outside_memory;
  for (const ImplicitInput& i : g.implicit) outside_memory.push_back(i.tensor);
  Restored before(outside_memory);
  Tensors out;
  for (const Tensor& t : run(inputs)) out.push_back(test::copy_of(t));
  for (const Tensor& t : outside_memory) out.push_back(test::copy_of(t));
  for (const Tensor& t : inputs) out.push_back(t);
  return out;
}

// How far the order of sums may move results, relative to the largest.
double tolerance_of(const Graph& g) {
  double most = 1e-9;
  for (const Value& v : g.values)
    most = std::max(most, v.meta.dtype == kBF16  ? 1e-1
                          : v.meta.dtype == kF16 ? 2e-2
                          : v.meta.dtype == kF32 ? 3e-4
                                                 : 0.0);
  return most;
}

// Expects equal numbers, and NaN where there is one. `more`: f64 [numel], an additional tolerance
// for each element.
std::string differs(const Tensor& got, const Tensor& want, double tolerance,
                    const Tensor& more = {}) {
  if (got.numel() != want.numel()) return "has another shape";
  Tensor a = contiguous(got.to(kF64)), b = contiguous(want.to(kF64));
  const double *p = a.data<double>(), *q = b.data<double>();
  double largest = 1;
  for (int64_t i = 0; i < b.numel(); ++i)
    if (std::isfinite(q[i])) largest = std::max(largest, std::abs(q[i]));
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (p[i] == q[i] || (std::isnan(p[i]) && std::isnan(q[i]))) continue;
    if (std::abs(p[i] - q[i]) <= tolerance * largest) continue;
    if (more.defined() && std::abs(p[i] - q[i]) <= more.data<double>()[i]) continue;
    return fmt::format("element {}: {}, expected {}", i, p[i], q[i]);
  }
  return "";
}

// How far the order of a sum may move it, relative to its terms.
double sums_apart(DType t) {
  return t == kBF16 ? 0x1p-8 : t == kF16 ? 0x1p-11 : t == kF32 ? 0x1p-15 : 0x1p-44;
}

// How far each result moves in all when the results of nodes move: the effect of the order of sums
// where a graph amplifies small differences, as the sine of a large number does. f64 [numel], by
// result.
Tensors conditions(const Graph& g, std::span<const Tensor> inputs) {
  struct Wave {
    Tensor in, out;
  };
  std::map<const Node*, Wave> waves;  // as they are when nothing moves
  auto results = [&](const Node* moved) {
    auto visit = [&](const Node& n, const Tensors& in, auto run) {
      const bool wave = n.prim->name() == "sin" || n.prim->name() == "cos";
      const Tensor given = wave ? clone(in[0]) : Tensor();
      for (const Tensor& t : run()) {
        auto shares = [&](const Tensor& x) { return x.storage() == t.storage(); };
        const bool view = n.into.empty() && std::ranges::any_of(in, shares);
        // A wave repeats after a period, so its operand is moved instead.
        if (wave && !moved)
          waves[&n] = {given, clone(t)};
        else if (wave)
          assign_(t,
                  waves[&n].out + minimum(abs(given - waves[&n].in), full({}, 2.0, {t.dtype()})));
        if (&n == moved && !view && is_floating(t.dtype()))
          assign_(t, t + abs(t) * sums_apart(t.dtype()));
      }
    };
    return results_of(g, inputs, [&](auto& given) { return walk(g, given, visit); });
  };
  auto flat = [](const Tensor& t) { return reshape(contiguous(t.to(kF64)), {-1}); };
  const Tensors still = results(nullptr);
  Tensors sum;
  for (const Tensor& t : still) sum.push_back(zeros({t.numel()}, {kF64}));
  for (const Node& n : g.nodes) {
    const Tensors moved = results(&n);
    for (size_t i = 0; i < moved.size(); ++i) {
      const Tensor a = flat(moved[i]), b = flat(still[i]), apart = abs(a - b);
      const Tensor same = logical_or(a == b, logical_and(isnan(a), isnan(b)));
      sum[i] = sum[i] + where(same, zeros_like(apart), apart);
    }
  }
  return sum;
}

std::string check_graph(const Case& c) {
  auto replayed = [&](const Graph& g) {
    return results_of(g, c.inputs, [&](auto& in) { return interpret(g, in); });
  };
  const Tensors want = replayed(c.recorded), coded = replayed(c.fused);
  const double tolerance = tolerance_of(c.recorded);
  for (size_t i = 0; i < want.size(); ++i) {
    const bool exact = i < c.exact.size()                                ? bool(c.exact[i])
                       : i < c.exact.size() + c.recorded.implicit.size() ? c.state_exact
                                                                         : true;
    const bool real = is_floating(want[i].dtype());
    std::string wrong = differs(coded[i], want[i], exact || !real ? 0 : tolerance);
    if (!wrong.empty() && !exact && real)
      wrong = differs(coded[i], want[i], tolerance, conditions(c.recorded, c.inputs)[i]);
    if (!wrong.empty()) return fmt::format("result {} {}", i, wrong);
  }
  Executor executor{Graph(c.fused)};
  for (int threads = 1; threads <= 3; ++threads) {
    const int before = num_threads();
    set_num_threads(threads);
    Tensors got = results_of(c.fused, c.inputs, [&](auto& in) { return executor.run(in); });
    set_num_threads(before);
    for (size_t i = 0; i < got.size(); ++i) {
      Tensor x = contiguous(got[i]), y = contiguous(coded[i]);
      if (x.nbytes() && std::memcmp(x.raw(), y.raw(), x.nbytes()) != 0)
        return fmt::format("result {} of the executor on {} threads: {}", i, threads,
                           differs(x, y, 0));
    }
  }
  return "";
}

void generate_code(std::vector<Case>& cases, Seen& seen) {
  std::vector<const Fused*> kernels;
  for (const Case& c : cases)
    for (const Fused* f : kernels_of(c.fused)) kernels.push_back(f);
  GenerateReport report;
  auto code = generate(kernels, {.cache_dir = test::kernel_cache()}, &report);
  seen.bodies += report.kernels;
  size_t at = 0;
  for (Case& c : cases) {
    const size_t n = kernels_of(c.fused).size();
    set_code(c.fused, std::span(code).subspan(at, n));
    at += n;
  }
}

// The smallest part of a failing graph whose results are far apart, if that shows it.
std::string smallest(const Case& c) {
  auto run = [&](const Graph& g, std::span<const Tensor> in) {
    std::vector<Tensor> inputs = test::copies(in), ours = test::copies(in);
    std::vector<Case> part(1);
    part[0] = {.seed = c.seed, .what = {}, .recorded = g, .fused = g, .inputs = inputs};
    optimise(part[0].fused, c.seed);
    Seen seen;
    generate_code(part, seen);
    std::string wrong = check_kernels(part[0].fused, inputs, seen);
    if (wrong.empty()) {
      part[0].exact.assign(g.outputs.size(), false);
      wrong = check_graph(part[0]);
    }
    TESSERA_CHECK(wrong.empty(), "{}", wrong);
    return interpret(g, in);
  };
  try {
    Graph g = c.recorded;
    return to_string(minimize(g, c.inputs, run));
  } catch (const Error& e) {
    return e.what();
  }
}

void check_case(const Case& c, Seen& seen) {
  std::string wrong;
  try {
    test::expect_same_sharing(c.fused, c.recorded);
    wrong = check_kernels(c.fused, c.inputs, seen);
    if (wrong.empty()) wrong = check_graph(c);
  } catch (const Error& e) {
    wrong = e.what();
  }
  if (wrong.empty()) return;
  ADD_FAILURE() << c.what << wrong << "\nsmallest: " << smallest(c);
}

TEST(GraphsFuzz, GeneratedCodeComputesWhatWasRecorded) {
  constexpr uint64_t kAtOnce = 60;
  const FuzzSeeds seeds = test::fuzz_seeds(60);
  Seen seen;
  for (uint64_t begin = seeds.first; begin < seeds.end(); begin += kAtOnce) {
    std::vector<Case> cases;
    for (uint64_t seed = begin; seed < std::min(begin + kAtOnce, seeds.end()); ++seed)
      cases.push_back(case_of(seed));
    generate_code(cases, seen);
    for (const Case& c : cases) check_case(c, seen);
  }
  RecordProperty("kernels", std::to_string(seen.kernels));
  RecordProperty("bodies", std::to_string(seen.bodies));
  EXPECT_TRUE(!seeds.many() || seen.unknown < seen.elements / 20) << seen.unknown;
}

TEST(GraphsFuzz, TextsCompileForCards) {
  if (!cuda::why_no_nvrtc().empty()) GTEST_SKIP() << cuda::why_no_nvrtc();
  const FuzzSeeds seeds = test::fuzz_seeds(30);
  std::vector<Body> bodies;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    const Case c = case_of(seed);
    for (const Fused* f : kernels_of(c.fused)) bodies.push_back(f->body);
  }
  const int printed = test::compile_for_cards(bodies);
  EXPECT_TRUE(!seeds.many() || size_t(printed) > bodies.size() * 3 / 5) << printed;
}

template <class F>
Case case_by_hand(const std::vector<Tensor>& inputs, F run) {
  std::vector<Case> one(1);
  Case& c = one[0];
  c.inputs = test::copies(inputs);
  c.recorded = c.fused = test::graph_of(inputs, [&] { return run(inputs); });
  c.exact.assign(c.recorded.outputs.size(), false);
  optimise(c.fused, 1);
  Seen seen;
  generate_code(one, seen);
  return c;
}

// The order of a sum of numbers below 1000 moves it by a period of a sine and more; that of smaller
// numbers by less than 3e-4.
TEST(GraphsFuzz, ASineIsAsUncertainAsTheSumThatItIsOf) {
  const Tensor x = rand({7, 400, 17}, {kF32}, Generator(5).next_key());
  for (double scale : {1000.0, 1.0, 1e-3}) {
    const Case c = case_by_hand({permute(x * scale, {0, 2, 1})}, [](const auto& in) {
      return Tensors{sin(sum(in[0], {1, 2}, true) * 3.0), cos(sum(in[0] * in[0], {0, 1}, true))};
    });
    Seen seen;
    EXPECT_EQ(check_kernels(c.fused, c.inputs, seen), "");
    EXPECT_GT(seen.kernels, 0);
    EXPECT_EQ(check_graph(c), "");
    const double open = amax(conditions(c.recorded, c.inputs)[0]).item<double>();
    EXPECT_GT(open, scale == 1000 ? 1 : 0);
    EXPECT_LT(open, scale == 1e-3 ? 0.02 : 10);
  }
}

// This includes rows of zeros, and 16 bits.
TEST(GraphsFuzz, WhatANormMayBeIsKnown) {
  for (DType dtype : {kF32, kBF16}) {
    const Tensor x = rand({100, 256}, {kF32}, Generator(5).next_key()),
                 some = reshape(arange(0, 100), {100, 1}) > 3;
    const Case c = case_by_hand({cast(x * some, dtype)}, [](const auto& in) {
      const Tensor y = in[0] - mean(in[0], {1}, true);
      return Tensors{tanh(tanh(y * rsqrt(mean(square(y), {1}, true) + 0.1)))};
    });
    Seen seen;
    EXPECT_EQ(check_kernels(c.fused, c.inputs, seen), "");
    EXPECT_EQ(seen.elements, 100 * 256);
    EXPECT_EQ(seen.unknown, 0);
  }
}

// The softmax of a row with NaN is NaN.
TEST(GraphsFuzz, WhatASoftmaxMayBeIsKnown) {
  const Tensor x = rand({100, 256}, {kF32}, Generator(5).next_key()),
               some = reshape(arange(0, 100), {100, 1}) == 7;
  const Case c = case_by_hand({masked_fill(x, some, NAN)}, [](const auto& in) {
    const Tensor p = exp(in[0] - amax(in[0], {1}, true));
    return Tensors{p / sum(p, {1}, true)};
  });
  Seen seen;
  EXPECT_EQ(check_kernels(c.fused, c.inputs, seen), "");
  EXPECT_EQ(seen.elements, 100 * 256);
  EXPECT_EQ(seen.unknown, 0);
}

// Programs at several sizes: code made for three of them serves others.
TEST(GraphsFuzz, CodeForManySizesComputesWhatWasRecorded) {
  constexpr int64_t sizes[] = {7, 40, 131, 3, 64, 97, 4099};
  constexpr uint64_t kAtOnce = 30;
  const FuzzSeeds seeds = test::fuzz_seeds(30);
  Seen seen;
  int64_t served = 0, own = 0;
  for (uint64_t begin = seeds.first; begin < seeds.end(); begin += kAtOnce) {
    std::vector<std::vector<Case>> programs;
    for (uint64_t seed = begin; seed < std::min(begin + kAtOnce, seeds.end()); ++seed) {
      programs.emplace_back();
      for (int64_t size : sizes) programs.back().push_back(case_of(seed, size));
    }
    std::vector<const Fused*> kernels;
    std::vector<SizedKernels::Sizes> sizes_of;
    for (const auto& cases : programs) {
      const std::vector<const Fused*> own_kernels = kernels_of(cases[0].fused);
      for (size_t k = 0; k < own_kernels.size(); ++k) {
        kernels.push_back(own_kernels[k]), sizes_of.emplace_back();
        for (const Case* c : {&cases[1], &cases[2]})
          if (auto same = kernels_of(c->fused); same.size() == own_kernels.size())
            sizes_of.back().push_back(same[k]);
      }
    }
    SizedKernels code;
    code.code_of(kernels, sizes_of, {.cache_dir = test::kernel_cache()});
    for (auto& cases : programs)
      for (Case& c : cases) {
        kernels = kernels_of(c.fused);
        if (kernels.empty() || !code.have(kernels)) {
          own += !kernels.empty();
          continue;
        }
        ++served;
        set_code(c.fused, code.code_of(kernels, {}, {.cache_dir = test::kernel_cache()}));
        check_case(c, seen);
      }
  }
  RecordProperty("kernels", std::to_string(seen.kernels));
  EXPECT_TRUE(!seeds.many() || served > own) << served << " of " << served + own;
}

}  // namespace
}  // namespace tessera::compiler
