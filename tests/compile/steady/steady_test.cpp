// A steady run of an executor allocates nothing: no heap memory where kernels need none, no system
// calls for memory or files, no block of the allocator beyond what was planned. This is a program
// of its own because it counts the process's allocations.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "compile/record/trace.h"
#include "compile/run/executor.h"
#include "core/base/parallel.h"
#include "core/dispatch/context.h"
#include "core/ops/fused.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/tensor/allocator.h"
#include "tests/compile/training.h"

// Sanitizers bring allocators and system calls of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
static std::atomic<long> heap_calls{0};

extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_memalign(size_t align, size_t bytes);
void* malloc(size_t bytes) {
  heap_calls.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(bytes);
}
void* aligned_alloc(size_t align, size_t bytes) {
  heap_calls.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(align, bytes);
}
}
#endif

namespace tessera::compiler {
namespace {

using test::batch, test::Training;

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

long heap_calls_of(Executor& executor, std::span<const Tensor> inputs) {
  for (int i = 0; i < 3; ++i) executor.run(inputs);
  long before = heap_calls.load();
  for (int i = 0; i < 10; ++i) executor.run(inputs);
  return heap_calls.load() - before;
}

TEST(Steady, TheCounterCounts) {
  long before = heap_calls.load();
  std::vector<int> v(10);
  void* p = std::aligned_alloc(64, 128);
  EXPECT_EQ(heap_calls.load() - before, 2) << v.size();
  std::free(p);
}

// This has everything of a training step but products of matrices, for which oneDNN allocates.
TEST(Steady, NothingIsAllocated) {
  Tensor x = rand({4, 8, 16}), w = rand({16}), b = rand({16}), table = rand({11, 16}),
         m = zeros({16}), v = zeros({16}), ids = randint(0, 11, {4, 8}),
         targets = randint(0, 16, {32});
  Generator generator{5};
  Scoped<Generator*> draws(context().generator, &generator);
  Trace trace({.inputs = {x, ids, targets}});
  for (Tensor* t : {&w, &b, &table}) t->requires_grad_();
  Tensor h = layer_norm(x + embedding(ids, table), w, b);
  h = dropout(gelu(transpose(h, 1, 2) * 1.5), 0.1);
  Tensor loss = nn::cross_entropy(reshape(transpose(softmax(h, 1), 1, 2), {32, 16}), targets);
  loss.backward();
  std::vector<Tensor> params{w, b, table};
  optim::Clip clip = optim::clip_grad_norm(params, 0.1);
  optim::AdamW opt(params, {.lr = 1e-3});
  opt.step(clip.scale);
  Executor executor(trace.finish({loss.detach(), clip.norm}));
  Tensor inputs[] = {x, ids, targets};
  EXPECT_EQ(executor.memory().eager_nodes, 0);
  EXPECT_EQ(heap_calls_of(executor, inputs), 0);
}

// Kills the process at the next call for memory or files.
void forbid_system_calls() {
  constexpr unsigned kill = SECCOMP_RET_KILL_PROCESS;
  std::vector<sock_filter> filter{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (long call :
       {SYS_mmap, SYS_munmap, SYS_mremap, SYS_madvise, SYS_brk, SYS_open, SYS_openat, SYS_read,
        SYS_pread64, SYS_stat, SYS_newfstatat, SYS_statx, SYS_mprotect, SYS_clone, SYS_clone3}) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, unsigned(call), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, kill));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
    _exit(77);
}

void open_a_file() { (void)!std::fopen("/dev/null", "r"); }
void look_at_a_file() {
  struct stat status {};
  (void)!::stat("/", &status);
}

// A whole GPT step; `ask`, where there is one, asks the system in the middle.
[[noreturn]] void run_without_system_calls(void (*ask)()) {
  set_num_threads(1);
  Training training(0.1);
  auto [ids, targets] = batch(0);
  Tensor inputs[] = {ids, targets};
  Trace trace({.inputs = {ids, targets}});
  Executor executor(trace.finish(training.step(ids, targets)));
  for (int i = 0; i < 5; ++i) executor.run(inputs);
  forbid_system_calls();
  for (int i = 0; i < 20; ++i) executor.run(inputs);
  if (ask) ask();
  _exit(0);
}

TEST(SteadyDeathTest, TheSystemIsAskedForNothing) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(run_without_system_calls(nullptr), testing::ExitedWithCode(0), "");
  for (auto ask : {open_a_file, look_at_a_file})
    EXPECT_EXIT(run_without_system_calls(ask), testing::KilledBySignal(SIGSYS), "");
}

#endif

models::GptOptions nano(double dropout) {
  models::GptOptions o = models::gpt_nano();
  o.dropout = dropout;
  return o;
}

// Scratch of products and what backward keeps are included: blocks of the first steps are used
// again.
TEST(Steady, AnEagerStepAsksTheSystemForNoMemory) {
  Training training(nano(0.1));
  const Tensor ids = randint(0, 65, {12, 64}), targets = randint(0, 65, {12, 64});
  for (int i = 0; i < 3; ++i) training.step(ids, targets);
  const MemoryStats before = cpu_memory_stats();
  for (int i = 0; i < 10; ++i) training.step(ids, targets);
  const MemoryStats after = cpu_memory_stats();
  EXPECT_EQ(after.system_calls, before.system_calls);
  EXPECT_EQ(after.system_bytes, before.system_bytes);
  EXPECT_EQ(after.live_bytes, before.live_bytes);
}

// Scratch of products is planned for the threads they run on; attention's, some kilobytes for each
// thread, is not. One thread is what the sizes of this test are stated for.
TEST(Steady, ThePeakIsThePlannedOneAndBelowEager) {
  set_num_threads(1);
  for (double dropout : {0.0, 0.1}) {
    Training training(nano(dropout));
    Tensor ids = randint(0, 65, {12, 64}), targets = randint(0, 65, {12, 64});
    for (int i = 0; i < 2; ++i) training.step(ids, targets);
    auto peak_of = [](auto f) {
      int64_t live = cpu_memory_stats().live_bytes;
      reset_peak_cpu_memory();
      f();
      return double(cpu_memory_stats().peak_bytes - live);
    };
    double eager = peak_of([&] { training.step(ids, targets); });
    Trace trace({.inputs = {ids, targets}});
    Executor executor(trace.finish(training.step(ids, targets)));
    Tensor inputs[] = {ids, targets};
    double measured = peak_of([&] {
      for (int i = 0; i < 3; ++i) executor.run(inputs);
    });
    const MemoryPlan& plan = executor.memory();
    double planned = double(plan.arena_bytes + plan.output_bytes);
    EXPECT_NEAR(planned, measured, 0.01 * measured) << "dropout " << dropout;
    EXPECT_LT(measured, eager) << "dropout " << dropout;
    // A second run takes nothing beside scratch of kernels.
    EXPECT_LT(peak_of([&] { executor.run(inputs); }), 0.01 * planned);
    std::printf("dropout %.1f: eager %.2f MB, planned %.2f MB, measured %.2f MB\n", dropout,
                eager / 1e6, planned / 1e6, measured / 1e6);
  }
}

// What an eager step left cached is returned to the system before the arena is allocated, so that
// the two do not add up in the memory of the process.
TEST(Steady, AnArenaIsNotTakenBesideWhatEagerStepsCached) {
  constexpr int64_t kMiB = 1 << 20;
  Tensor x = ones({1024});
  Trace trace({.inputs = {x}});
  Executor executor(trace.finish({x * 2.0 + 1.0}));
  { Tensor cached = ones({64 * kMiB / 4}); }
  const int64_t before = cpu_memory_stats().system_bytes;
  Tensor inputs[] = {x};
  executor.run(inputs);
  EXPECT_LT(cpu_memory_stats().system_bytes, before - 60 * kMiB);
}

}  // namespace
}  // namespace tessera::compiler
