// The cache of compiled kernels: what is compiled when, and what is left behind after errors.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

#include "compile/codegen/toolchain.h"
#include "core/base/isa.h"
#include "core/core.h"
#include "tests/compile/codegen/compare.h"
#include "tests/support/temp_folder.h"

namespace tessera::test {

using namespace compiler;
namespace {

GenerateReport make(const std::vector<Body>& bodies, const GenerateOptions& options) {
  std::vector<Ref<const Fused>> fused;
  std::vector<const Fused*> kernels;
  for (const Body& b : bodies) {
    fused.push_back(make_ref<const Fused>("h_0_norm", b, results_of(b)));
    kernels.push_back(fused.back().get());
  }
  GenerateReport report;
  auto loaded = generate(kernels, options, &report);
  EXPECT_EQ(loaded.size(), bodies.size());
  // What was loaded runs.
  Tensor x = ones({4, 8}), y = zeros({4, 8});
  char* p[] = {static_cast<char*>(x.raw()), static_cast<char*>(y.raw())};
  compiler::run_code(loaded[0]->code, p, nullptr);
  EXPECT_EQ(y.data<float>()[31], 0.125f);
  return report;
}

std::string error_of_make(const GenerateOptions& options) {
  try {
    make({softmax_body(4, 8)}, options);
  } catch (const UserError& e) {
    return e.what();
  }
  return "";
}

// The system's compiler behind a script that begins with `lines`.
std::string compiler_with(const TempFolder& folder, const std::string& lines) {
  std::string path = folder.write("compiler", "#!/bin/sh\n" + lines + "\nexec c++ \"$@\"\n");
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}
// A compiler that counts in `folder`/calls how often it compiles, then sleeps for `seconds`.
std::string counting_compiler(const TempFolder& folder, double seconds = 0) {
  return compiler_with(folder, fmt::format("[ $1 = -dM ] || {{ echo $$ >> '{}'; sleep {}; }}",
                                           folder / "calls", seconds));
}
int calls(const TempFolder& folder) {
  std::string text = folder.read("calls");
  return int(std::count(text.begin(), text.end(), '\n'));
}

// Runs `work` in a child, which ends without running destructors of the test.
pid_t child(const std::function<void()>& work) {
  pid_t pid = fork();
  if (pid != 0) return pid;
  try {
    work();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    _exit(1);
  }
  _exit(testing::Test::HasFailure() ? 1 : 0);
}
bool ended_well(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(KernelCache, EqualBodiesAreCompiledOnceAndASecondCallCompilesNothing) {
  TempFolder folder;
  GenerateOptions options{.cache_dir = folder / "cache", .compiler = counting_compiler(folder)};
  Body a = softmax_body(4, 8), b = softmax_body(4, 9);
  GenerateReport first = make({a, a, b, a}, options);
  EXPECT_EQ(first.kernels, 2);
  EXPECT_EQ(first.compiled, 2);
  EXPECT_FALSE(first.from_cache);
  EXPECT_EQ(calls(folder), 1);
  GenerateReport second = make({a, a, b, a}, options);
  EXPECT_EQ(second.compiled, 0);
  EXPECT_TRUE(second.from_cache);
  EXPECT_TRUE(ended_well(child([&] { EXPECT_EQ(make({a, b}, options).compiled, 0); })));
  EXPECT_EQ(calls(folder), 1);
}

TEST(KernelCache, ProcessesThatStartTogetherCompileOnce) {
  TempFolder folder;
  GenerateOptions options{.cache_dir = folder / "cache",
                          .compiler = counting_compiler(folder, 0.3)};
  std::vector<pid_t> pids;
  for (int i = 0; i < 8; ++i) pids.push_back(child([&] { make({softmax_body(4, 8)}, options); }));
  for (pid_t pid : pids) EXPECT_TRUE(ended_well(pid));
  EXPECT_EQ(calls(folder), 1);
}

TEST(KernelCache, AKilledCompilationLeavesNothingThatIsUsedOrWaitedFor) {
  TempFolder folder;
  GenerateOptions options{.cache_dir = folder / "cache",
                          .compiler = counting_compiler(folder, 0.5)};
  pid_t victim = child([&] { make({softmax_body(4, 8)}, options); });
  while (calls(folder) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  kill(victim, SIGKILL);
  waitpid(victim, nullptr, 0);
  GenerateReport report = make({softmax_body(4, 8)}, options);
  EXPECT_EQ(report.compiled, 1);
  EXPECT_EQ(calls(folder), 2);
  EXPECT_LT(report.seconds, 30);
  // Nothing but the entry and its lock is left.
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  int entries = 0;
  for (auto& f : std::filesystem::directory_iterator(folder / "cache")) {
    EXPECT_TRUE(f.path().extension() == ".so" || f.path().extension() == ".lock") << f.path();
    entries += f.path().extension() == ".so";
  }
  EXPECT_EQ(entries, 1);
}

// A signal stops a maker in the middle of a compilation. One of the waiting processes makes the
// entry again, for which the deadline leaves several times what compiling takes.
TEST(KernelCache, AMakerThatIsStoppedIsNotWaitedForLongerThanForACollective) {
  TempFolder folder;
  const GenerateOptions options{.cache_dir = folder / "cache",
                                .compiler = counting_compiler(folder, 0.5)};
  const pid_t stopped = child([&] { make({softmax_body(4, 8)}, options); });
  while (calls(folder) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  kill(stopped, SIGSTOP);
  setenv("TESSERA_TIMEOUT", "4", 1);
  std::vector<pid_t> others;
  for (int i = 0; i < 2; ++i) others.push_back(child([&] { make({softmax_body(4, 8)}, options); }));
  testing::internal::CaptureStderr();
  const GenerateReport report = make({softmax_body(4, 8)}, options);
  const std::string said = testing::internal::GetCapturedStderr();
  unsetenv("TESSERA_TIMEOUT");
  for (const pid_t pid : others) EXPECT_TRUE(ended_well(pid));
  EXPECT_EQ(calls(folder), 2);
  EXPECT_GE(report.seconds, 4);
  EXPECT_LT(report.seconds, 30);
  expect_contains(said, "codegen: has waited 2");
  expect_contains(said, " s for the process that compiles and holds " + folder / "cache/");
  kill(stopped, SIGCONT);
  EXPECT_TRUE(ended_well(stopped));
  EXPECT_EQ(make({softmax_body(4, 8)}, options).compiled, 0);
}

// No process goes on without kernels that its peers have.
TEST(KernelCache, ACompilationThatTakesLongerThanACollectiveMayFailsNobody) {
  TempFolder folder;
  const GenerateOptions options{.cache_dir = folder / "cache",
                                .compiler = counting_compiler(folder, 1.5)};
  setenv("TESSERA_TIMEOUT", "0.3", 1);
  std::vector<pid_t> pids;
  for (int i = 0; i < 4; ++i) pids.push_back(child([&] { make({softmax_body(4, 8)}, options); }));
  for (const pid_t pid : pids) EXPECT_TRUE(ended_well(pid));
  unsetenv("TESSERA_TIMEOUT");
}

// A compiler and what it has started.
TEST(KernelCache, NoCompilerOutlivesAKilledMaker) {
  TempFolder folder;
  GenerateOptions options{
      .cache_dir = folder / "cache",
      .compiler = compiler_with(folder, fmt::format("sleep 60 & echo $! $$ > '{0}.part'\n"
                                                    "mv '{0}.part' '{0}'\nwait",
                                                    folder / "pids"))};
  pid_t maker = child([&] { make({softmax_body(4, 8)}, options); });
  while (!std::ifstream(folder / "pids")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  kill(maker, SIGKILL);
  waitpid(maker, nullptr, 0);
  std::istringstream pids(folder.read("pids"));
  for (int pid; pids >> pid;) {
    std::string state = "?";
    for (int i = 0; i < 500 && !state.empty() && state != "Z"; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      state.clear();
      std::ifstream(fmt::format("/proc/{}/stat", pid)) >> state >> state >> state;
    }
    EXPECT_TRUE(state.empty() || state == "Z") << pid << " is in state " << state;
    if (state != "Z" && !state.empty()) kill(pid, SIGKILL);
  }
}

TEST(KernelCache, WhatMakersOfOtherEntriesLeftIsRemovedAfterADay) {
  namespace fs = std::filesystem;
  TempFolder folder;
  auto left = [&](const std::string& key, int hours) {
    const std::string work = "cache/" + key + ".work-a1b2c3";
    folder.write(work + "/kernels0.cpp", "int x;");
    folder.write("cache/" + key + ".lock", "");
    fs::last_write_time(folder / work,
                        fs::file_time_type::clock::now() - std::chrono::hours(hours));
    return folder / work;
  };
  const std::string dead = left("dead", 30), young = left("young", 20), alive = left("alive", 30);
  const int lock = open((folder / "cache/alive.lock").c_str(), O_RDWR);
  ASSERT_EQ(flock(lock, LOCK_EX | LOCK_NB), 0);
  const GenerateOptions options{.cache_dir = folder / "cache"};
  make({softmax_body(4, 8)}, options);
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_TRUE(fs::exists(young));
  EXPECT_TRUE(fs::exists(alive));
  close(lock);
  make({softmax_body(4, 8), softmax_body(4, 9)}, options);
  EXPECT_FALSE(fs::exists(alive));
}

TEST(KernelCache, ADamagedEntryIsMadeAgain) {
  TempFolder folder;
  GenerateOptions options{.cache_dir = folder / "cache"};
  make({softmax_body(4, 8)}, options);
  std::string entry;
  for (auto& f : std::filesystem::directory_iterator(folder / "cache"))
    if (f.path().extension() == ".so") entry = f.path();
  std::string bytes = folder.read("cache/" + std::filesystem::path(entry).filename().string());
  for (size_t length : {bytes.size(), bytes.size() / 2, size_t(10), size_t(0)}) {
    std::string damaged = bytes.substr(0, length);
    if (length == bytes.size()) damaged[length / 3] ^= 1;
    std::filesystem::remove(entry);  // it is loaded: its pages must stay as they are
    std::ofstream(entry, std::ios::binary) << damaged;
    EXPECT_EQ(make({softmax_body(4, 8)}, options).compiled, 1) << length;
    EXPECT_EQ(make({softmax_body(4, 8)}, options).compiled, 0) << length;
  }
}

TEST(KernelCache, OtherCompilersOtherBodiesOtherEntries) {
  TempFolder folder;
  std::string cache = folder / "cache";
  make({softmax_body(4, 8)}, {.cache_dir = cache});
  EXPECT_EQ(make({softmax_body(4, 8)}, {.cache_dir = cache, .compiler = counting_compiler(folder)})
                .compiled,
            1);
  Body other = softmax_body(4, 8);
  other.instrs[2].op = "add";
  std::vector<Body> both{softmax_body(4, 8), other};
  EXPECT_EQ(make(both, {.cache_dir = cache}).compiled, 2);
}

TEST(KernelCache, EachThingThatIsMissingGivesOneClearError) {
  TempFolder folder;
  folder.write("file", "");
  std::string error = error_of_make({.cache_dir = folder / "file/cache"});
  EXPECT_NE(error.find("cannot be written"), std::string::npos) << error;
  EXPECT_NE(error.find("TESSERA_COMPILE_CACHE"), std::string::npos) << error;
  error = error_of_make({.cache_dir = "/proc/tessera"});
  EXPECT_NE(error.find("codegen: the cache /proc/tessera cannot be written"), std::string::npos)
      << error;
  error = error_of_make({.cache_dir = folder / "cache", .compiler = folder / "no-such-compiler"});
  EXPECT_NE(error.find("no-such-compiler"), std::string::npos) << error;
  EXPECT_NE(error.find("TESSERA_COMPILE_CXX"), std::string::npos) << error;
  std::string broken = folder.write("broken", "#!/bin/sh\necho 'out of luck' >&2\nexit 3\n");
  std::filesystem::permissions(broken, std::filesystem::perms::owner_all);
  error = error_of_make({.cache_dir = folder / "cache", .compiler = broken});
  EXPECT_NE(error.find("out of luck"), std::string::npos) << error;
  EXPECT_NE(error.find(broken), std::string::npos) << error;
}

TEST(KernelCache, AnEntryOfAFolderThatCannotBeWrittenIsUsed) {
  namespace fs = std::filesystem;
  TempFolder folder;
  GenerateOptions options{.cache_dir = folder / "cache"};
  make({softmax_body(4, 8)}, options);
  constexpr auto kReadOnly = fs::perms(0555);
  fs::permissions(folder.str(), kReadOnly);
  fs::permissions(folder / "cache", kReadOnly);
  EXPECT_TRUE(ended_well(child([&] {
    constexpr uid_t kNobody = 65534;
    if (geteuid() == 0 && setuid(kNobody) != 0) throw UserError("setuid failed");  // root may write
    EXPECT_EQ(make({softmax_body(4, 8)}, options).compiled, 0);
    std::string error;
    try {
      make({softmax_body(4, 8), softmax_body(4, 9)}, options);
    } catch (const UserError& e) {
      error = e.what();
    }
    EXPECT_NE(error.find("cannot be written: Permission denied"), error.npos) << error;
  })));
  fs::permissions(folder.str(), fs::perms::owner_all);
  fs::permissions(folder / "cache", fs::perms::owner_all);
}

TEST(KernelCache, SourcesAreDumped) {
  TempFolder folder;
  make({softmax_body(4, 8)}, {.cache_dir = folder / "cache", .dump_dir = folder / "dump"});
  std::string text;
  for (auto& f : std::filesystem::directory_iterator(folder / "dump"))
    text = folder.read("dump/" + f.path().filename().string());
  EXPECT_NE(text.find("// h_0_norm\n"), std::string::npos);
  EXPECT_NE(text.find("k0_h_0_norm_run"), std::string::npos);
}

// A compiler that defines Clang's macro and, like Clang, refuses an option of GCC.
TEST(Toolchain, ClangIsACompilerToo) {
  TempFolder folder;
  std::string clang =
      compiler_with(folder,
                    "[ $1 = -dM ] && exec echo '#define __clang__ 1'\n"
                    "case $* in *-fno-tree-*) echo unknown argument >&2; exit 1;; esac");
  EXPECT_EQ(make({softmax_body(4, 8)}, {.cache_dir = folder / "cache", .compiler = clang}).compiled,
            1);
}

#ifdef __x86_64__
// ctest runs it with TESSERA_ISA=v3 and without.
TEST(Toolchain, CompilesForTheInstructionSetThatIsAsked) {
  const char* asked = std::getenv("TESSERA_ISA");
  const cpu::Isa isa = cpu::current_isa();
  const bool all = !asked || !*asked || isa == cpu::Isa::kV4;
  expect_contains(find_toolchain("").description, all                    ? "-march=native"
                                                  : isa == cpu::Isa::kV3 ? "-march=x86-64-v3"
                                                                         : "-march=x86-64 ");
}
#endif

}  // namespace
}  // namespace tessera::test
