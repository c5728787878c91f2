// What the calling thread allocates memory of a device for: parameters, activations, gradients, the
// state of an optimizer, and the module or parameter that it is of. An allocator that keeps
// accounts reads the label when it hands out a block, so that it can say who holds its memory.
// Entering and leaving costs a few stores; text is made where an allocator asks for it. Invariant:
// labels live on the C++ stack and are left in reverse order.
// Internal: not part of the public interface.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

class Tensor;

enum class MemoryUse : uint8_t { kOther, kParameters, kActivations, kGradients, kOptimizerState };
inline constexpr int kNumMemoryUses = 5;
/// "parameters"; "other" for kOther.
std::string_view name_of(MemoryUse use);

/// Whose a block is.
struct MemoryHolder {
  MemoryUse use = MemoryUse::kOther;
  std::string of;  // "h.0.attn"; "" where it is of no module
  /// "activations of h.0.attn"; "(no label)" where nothing is known.
  std::string text() const;
};
/// The one holder with these contents; it lives as long as the process.
const MemoryHolder& memory_holder(MemoryUse use, std::string_view of);

/// Blocks that this thread allocates while this lives have this label; the innermost counts.
class MemoryLabel {
 public:
  /// `of` must outlive the label.
  explicit MemoryLabel(MemoryUse use, std::string_view of = {}) : before_(in_force()) {
    in_force() = {use, of};
  }
  ~MemoryLabel() { in_force() = before_; }
  MemoryLabel(const MemoryLabel&) = delete;
  MemoryLabel& operator=(const MemoryLabel&) = delete;

  /// That of the label in force.
  static const MemoryHolder& holder();

 private:
  struct Frame {
    MemoryUse use = MemoryUse::kOther;
    std::string_view of;
  };
  static Frame& in_force() {
    constinit thread_local Frame frame;
    return frame;
  }
  Frame before_;
};

/// The module that a tensor of this name is of: "h.0.attn" for "h.0.attn.weight", "" for "weight".
constexpr std::string_view module_of(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == name.npos ? std::string_view() : name.substr(0, dot);
}

/// Says whose the memory of `t` is from now on, where its device's allocator keeps accounts.
void set_memory_holder(const Tensor& t, MemoryUse use, std::string_view of);

}  // namespace tessera
