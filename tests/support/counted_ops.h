// How often ops run on the calling thread.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "core/dispatch/target.h"

namespace tessera::test {

/// Counts the ops of the calling thread by name while it lives, those of backward included.
class CountedOps final : public Backend {
 public:
  Tensors run(const PrimRef& prim, Inputs in) override {
    ++counts_[std::string(prim->name())];
    return eager_backend().run(prim, in);
  }
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override {
    eager_backend().assign(dst, prim, in);
  }
  int of(const std::string& name) { return counts_[name]; }
  /// Begins to count from 0 again.
  int take(const std::string& name) { return std::exchange(counts_[name], 0); }

 private:
  std::map<std::string, int> counts_;
  BackendScope on_{{.backend = this}};
};

}  // namespace tessera::test
