// Names the limits of kernels that a test did not cross, that is, meet from both sides.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tessera::test {

/// Families of limits, each with the test program that meets them; those of no row here are met by
/// Large.* in test_core_ops.
struct FamilyElsewhere {
  std::string_view family, program;
};
inline constexpr FamilyElsewhere kFamiliesElsewhere[] = {
    {"generated", "test_compile"},
    {"fuse", "test_compile_passes"},
    {"accumulate", "test_compile"},
    {"decompose", "test_compile_passes"},
    {"streams", "test_compile_codegen"},
    {"trees", "test_collectives"},
    {"shm", "test_collectives"},
    {"messages", "test_collectives"},
    {"snapshot", "test_parallel_checkpoint"},
    {"replicas", "test_parallel_checkpoint"},
};

/// A line for each limit of `families`, or where that is empty of those of no row above, that this
/// CPU has and that what was counted did not meet one short of it, at it and one beyond it.
std::string not_met(const std::vector<std::string_view>& families = {});

}  // namespace tessera::test
