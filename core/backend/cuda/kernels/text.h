// A kernel is a text: the functors and helpers that its family needs, the family's templates, and
// for each instance the entry points of the family with names and types put in. Invariant: the same
// texts compile by NVRTC and by the virtual GPU, include nothing, and depend on nothing but what is
// named here, so that a cache may take the text as its key.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cuda {

/// A file of this folder or of core/ops/functors as text, put into the binary by the build.
struct EmbeddedText {
  const char* path;
  std::string_view text;
};
extern const EmbeddedText kKernelTexts[];
extern const size_t kNumKernelTexts;

/// A word of a family's entry points, and what takes its place.
struct Define {
  std::string_view word;
  std::string value;
};

/// The entry points of a family for one choice of types and ops. Those of an instance `exp_f32` are
/// called exp_f32_packs and so on: the family's names with NAME replaced.
struct Instance {
  std::string name;
  std::vector<Define> defines;
};

/// `family` is a file of this folder without .cu. One compilation makes all instances.
struct KernelText {
  std::string_view family;
  std::vector<Instance> instances;
};

/// "rows.cu: softmax_f32", after the first instance: what errors and caches call it.
std::string name_of(const KernelText& text);
/// The text of a compilation unit; throws BugError for a family that is not there.
std::string compose(const KernelText& text);

/// The C++ type in kernels of a dtype's elements: f32 -> float. Names as name_of(DType) gives.
std::string_view element_type(std::string_view dtype);
/// An integer type of 1, 2, 4 or 8 bytes, for kernels that move elements and do not compute.
std::string_view bits_type(int bytes);

/// A launch: blocks and threads along x, y and z, and bytes of dynamic shared memory.
struct Geometry {
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
};

}  // namespace tessera::cuda
