// Shares code among bodies that differ only in sizes. Their texts are equal but for the numbers
// that follow from sizes (SizedText). A number that differs becomes a run-time value, which the
// code finds after the addresses of its results. Invariant: code is used for a body only if its
// text, with the numbers of the body put in, is the text that print_cpp gives.
#pragma once
#include <string>
#include <vector>

#include "compile/codegen/generate.h"

namespace tessera::compiler {

class SizedKernels {
 public:
  /// One body at further sizes that are expected in later calls.
  using Sizes = std::vector<const Fused*>;

  /// Returns code for each of `kernels`, compiling one file for those that the existing code does
  /// not serve. New code for a kernel also serves its other sizes (`sizes` has an element for each
  /// kernel, or is empty). Throws what generate() throws.
  std::vector<Ref<const LoadedKernel>> code_of(std::span<const Fused* const> kernels,
                                               std::span<const Sizes> sizes,
                                               const GenerateOptions& options = {});
  /// True when code_of would not compile.
  bool have(std::span<const Fused* const> kernels) const;
  /// How often the compiler ran, or its output was loaded from the cache, so far.
  int compilations() const { return compilations_; }

 private:
  struct Variant {
    std::string text;                // with marks for numbers
    std::vector<std::string> fixed;  // by number; "" where it is a run-time value
    std::vector<int64_t> capacity;   // by number; -1 where it is none
    Ref<const LoadedKernel> code;
  };
  const Variant* find(const SizedText& text) const;
  void compile(std::span<const Sizes> sizes, const GenerateOptions& options);

  std::vector<Variant> variants_;
  int compilations_ = 0;
};

}  // namespace tessera::compiler
