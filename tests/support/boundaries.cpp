#include "tests/support/boundaries.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/boundary.h"
#include "core/base/isa.h"

namespace tessera::test {
namespace {

bool has(Needs needs) {
  if (needs == Needs::kBf16Dot) return cpu::has_bf16_dot();
  return needs == Needs::kAnyCpu || cpu::current_isa() == cpu::Isa::kV4;
}

}  // namespace

std::string not_met(const std::vector<std::string_view>& families) {
  std::string all;
  for (int i = 0; i < kNumBoundaries; ++i) {
    const Boundary& b = kBoundaries[i];
    const std::string_view name = b.name, family = name.substr(0, name.find('.'));
    const bool wanted =
        families.empty()
            ? std::ranges::none_of(kFamiliesElsewhere, [&](auto& f) { return f.family == family; })
            : std::ranges::find(families, family) != families.end();
    const uint8_t met = boundary_met(i);
    if (!wanted || !has(b.needs) || met == 7) continue;
    all += fmt::format("{}, limit {}:{}{}{}\n", name, b.limit,
                       met & 1 ? "" : " no case is one short of it;",
                       met & 2 ? "" : " none is at it;", met & 4 ? "" : " none is one beyond it;");
  }
  return all;
}

}  // namespace tessera::test
