// For tests of passes that join ops which a card's kernels compute together: a function before and
// after the passes, and what the virtual driver counts.
#pragma once
#include <dlfcn.h>

#include <functional>
#include <optional>

#include "compile/ir/interpreter.h"
#include "compile/passes/passes.h"
#include "compile/record/trace.h"
#include "core/core.h"
#include "tests/support/on_card.h"

namespace tessera::test {

inline int count(const compiler::Graph& g, std::string_view op) {
  int n = 0;
  for (const compiler::Node& node : g.nodes) n += node.prim->name() == op;
  return n;
}

/// How often the virtual driver ran an op, or any (null), -1 on a card, which does not count; and
/// the bytes that these read and wrote, which the checked mode counts.
struct CardCounts {
  int64_t runs = -1, bytes = 0;
};
inline CardCounts counts_on_card(const char* op, Device card) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  const auto ask =
      reinterpret_cast<int (*)(const char*, unsigned long long*)>(dlsym(driver, "vgpu_counters"));
  if (!ask) return {};
  runtime_of(card).synchronize(stream_of(card));
  unsigned long long counters[3];
  ask(op, counters);
  return {int64_t(counters[0]), int64_t(counters[1] + counters[2])};
}
inline int64_t runs_on_card(const char* op, Device card) { return counts_on_card(op, card).runs; }

class JoinedOnCard : public OnCard {
 protected:
  /// Numbers from -0.5 to 0.5.
  Tensor drawn(const Shape& shape, int64_t key, DType t = kBF16) {
    return (rand(shape, {.device = kCPU}, from_values<int64_t>({key, 1}, {2})) - 0.5)
        .to(t)
        .to(card_);
  }
  /// The graph that the passes make of `f`, which computes what `f` does, but for roundings.
  static compiler::Graph joined(const std::vector<Tensor>& in, const std::function<Tensors()>& f,
                                std::optional<double> tolerance = {}) {
    compiler::Trace trace({.inputs = in});
    const compiler::Graph before = trace.finish(f());
    compiler::Graph after = before;
    compiler::run_passes(after);
    const Tensors want = interpret(before, in), got = interpret(after, in);
    for (size_t i = 0; i < want.size(); ++i) {
      const double bound = tolerance.value_or(want[i].dtype() == kBF16  ? 1.6e-2
                                              : want[i].dtype() == kF16 ? 2e-3
                                                                        : 2e-6);
      EXPECT_TRUE(allclose(got[i].cpu().to(kF64), want[i].cpu().to(kF64), bound, bound))
          << "result " << i << to_string(after);
    }
    return after;
  }
};

/// The tests need a card whose products have epilogues.
class ProductsOnCard : public JoinedOnCard {
 protected:
  void SetUp() override {
    JoinedOnCard::SetUp();
    if (!IsSkipped() && !runtime_of(card_).has_epilogues())
      GTEST_SKIP() << "products of this device compute nothing beside themselves";
  }
};

}  // namespace tessera::test
