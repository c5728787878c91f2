// Which part of a training step runs.
#pragma once
#include <cstdint>
#include <string_view>

namespace tessera {

/// Set by backward() and by optimizers; a trace records it with every op.
enum class Phase : uint8_t { kForward, kBackward, kUpdate };
inline constexpr int kNumPhases = 3;
constexpr std::string_view name_of(Phase p) {
  constexpr std::string_view names[] = {"forward", "backward", "update"};
  return names[int(p)];
}

}  // namespace tessera
