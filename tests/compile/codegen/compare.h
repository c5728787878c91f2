// Compares generated code with the interpreter: pointwise results bit by bit, sums within the
// rounding of their terms.
#pragma once
#include <gtest/gtest.h>

#include <vector>

#include "compile/codegen/generate.h"
#include "compile/codegen/samples.h"

namespace tessera::test {

using compiler::Body;

/// The folder that tests compile into: fresh for each process, removed at its end.
const std::string& kernel_cache();

/// While it lives, results of so many bytes and more are streamed.
class StreamedFrom {
 public:
  explicit StreamedFrom(int64_t bytes);
  ~StreamedFrom();
  StreamedFrom(const StreamedFrom&) = delete;
};

/// Memory for operand k of `body`, filled with numbers that suit its dtype.
Tensor operand_of(const Body& body, size_t k, uint64_t seed);
/// Memory for result k, filled with a pattern.
Tensor result_of(const Body& body, size_t k);

/// Whether result `result` of a kernel of `body` may lie over operand `operand`.
bool may_overwrite(const Body& body, int operand, int result);

/// Compiles `bodies` together and compares each with interpret_body(): results that no float
/// reduction feeds must have equal bits, maxima and minima equal numbers; others may differ by
/// `tolerance` of the largest. Chunks in another order and results over operands must give the same
/// bits. `seeds`: of random bodies, from which their operands are drawn too.
void compare_with_interpreter(const std::vector<Body>& bodies, double tolerance = 1e-5,
                              const std::vector<uint64_t>& seeds = {});

/// Generates code for those of `bodies` that `device` has a layout for, and compares it in the same
/// way; operands that are not aligned and results over operands must give the same bits. Returns
/// how many there are.
int compare_on_device(Device device, const std::vector<Body>& bodies, double tolerance = 1e-5,
                      const std::vector<uint64_t>& seeds = {});

/// Compiles the CUDA text of those of `bodies` that have one by NVRTC for sm_90, without a word
/// from the compiler. Returns how many there are; kernels are called kernel_0, kernel_1, ...
int compile_for_cards(const std::vector<Body>& bodies);

}  // namespace tessera::test
