// That hot loops are vector code: they execute a fraction of the instructions of the same functions
// one call at a time. Instructions are counted, since times depend on what else the machine does.
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <vector>

#include "tests/core/ops/hot_loops.h"

namespace tessera::test {
namespace {

using Loop = void (*)(const float*, float*, int);

// What `run` executes for `n` elements, in a child that is stopped after each instruction; -1 where
// that fails.
int64_t instructions(Loop run, int n) {
  std::vector<float> x(static_cast<size_t>(n)), y(x.size());
  for (int i = 0; i < n; ++i) x[size_t(i)] = 0.1f * float(i - n / 2) + 0.001f;
  run(x.data(), y.data(), n);  // what is done only once is done now
  const pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    run(x.data(), y.data(), n);
    _exit(0);
  }
  int status = 0;
  int64_t count = 0;
  for (; waitpid(child, &status, 0) == child && WIFSTOPPED(status); ++count)
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) kill(child, SIGKILL);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? count : -1;
}

TEST(VectorCode, HotLoopsTakeAFractionOfTheInstructions) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers look at each access, which is no vector code";
#endif
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    GTEST_SKIP() << "the loops are compiled for AVX2, which this processor has not";
#endif
  constexpr int kCount = 64;
  for (const HotLoop& hot : hot_loops) {
    auto per_element = [](Loop run) {
      const int64_t around = instructions(run, 0), all = instructions(run, kCount);
      EXPECT_TRUE(0 < around && around < all) << "cannot count: " << around << ", " << all;
      return double(all - around) / kCount;
    };
    const double at_once = per_element(hot.all_at_once), one_by_one = per_element(hot.one_by_one);
    EXPECT_LT(at_once * 2, one_by_one) << hot.name << " is no longer vectorised";
  }
}

}  // namespace
}  // namespace tessera::test
