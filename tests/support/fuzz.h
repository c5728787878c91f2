// Which cases tests of random cases run: always the same ones, unless the environment asks for
// others. TESSERA_FUZZ_SEED is the seed of the first case, TESSERA_FUZZ_COUNT how many follow on
// each other; one, where only a seed is set.
#pragma once
#include <errno.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>

namespace tessera::test {

struct FuzzSeeds {
  uint64_t first, count;
  uint64_t end() const { return first + count; }
  /// Whether there are enough for a look at what they are like together.
  bool many() const { return count >= 20; }
};

/// `count`: of a test that is not asked for others.
inline FuzzSeeds fuzz_seeds(uint64_t count) {
  auto number = [](const char* variable, uint64_t otherwise) {
    const char* text = std::getenv(variable);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
  };
  const uint64_t at_first = std::getenv("TESSERA_FUZZ_SEED") ? 1 : count;
  return {number("TESSERA_FUZZ_SEED", 1), number("TESSERA_FUZZ_COUNT", at_first)};
}

/// How the case of `seed` of the test that runs now is run alone.
inline std::string run_again(uint64_t seed) {
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  return fmt::format("seed {}; again: TESSERA_FUZZ_SEED={} {} --gtest_filter={}.{}\n", seed, seed,
                     program_invocation_short_name, test.test_suite_name(), test.name());
}

}  // namespace tessera::test
