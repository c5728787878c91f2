// Code for bodies that differ in sizes alone. Their texts are equal but for the numbers that follow
// from sizes (SizedText); a number that differs becomes a run-time value, which the code finds
// behind the addresses of its results. Invariant: code is used for a body only if its text, with
// the body's numbers put in, is the text that print_cpp gives.
#pragma once
#include <string>
#include <vector>

#include "compile/codegen/generate.h"

namespace tessera::compiler {

class SizedKernels {
 public:
  /// One body at further sizes that calls are known to have.
  using Sizes = std::vector<const Fused*>;

  /// Code for each of `kernels`, with what is there, else by compiling one file: for each kernel
  /// that has none, code for all its sizes too (`sizes` holds an element for each kernel, or is
  /// empty). Throws as generate().
  std::vector<Ref<const LoadedKernel>> code_of(std::span<const Fused* const> kernels,
                                               std::span<const Sizes> sizes,
                                               const GenerateOptions& options = {});
  /// True when code_of would not compile.
  bool have(std::span<const Fused* const> kernels) const;
  /// Runs of the compiler, or loads from its cache, so far.
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
