// What g++ cannot read of preprocessed CUDA C++, made into what it can: `__global__` and
// `__launch_bounds__` go (and tell which kernels there are), `__shared__` becomes a static variable
// in a section of its own, and `extern __shared__ T name[]` a pointer to the launch's memory.
// Invariant: lines stay lines, so that messages and barriers name those of the kernel's text.
#pragma once
#include <string>
#include <vector>

namespace vgpu {

struct KernelText {
  std::string name;
  std::string bound;  // an expression: the most threads of a block, or "0"
};

struct PlainText {
  std::string text;
  std::vector<KernelText> kernels;
};
PlainText plain_text(const std::string& preprocessed);

}  // namespace vgpu
