#include "tests/vgpu/faults/child.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>

#include "tests/vgpu/faults/kernels.h"

namespace vgpu_test {

namespace {

// The parent compiles, once for each mode: compilers are slow.
const std::string& image(bool checked) {
  static std::map<bool, std::string> all;
  std::string& found = all[checked];
  if (found.empty()) {
    setenv("VGPU_CHECK", checked ? "1" : "0", 1);
    const Compiled c =
        compile(kKernels, {"--gpu-architecture=sm_90", "--std=c++20", "--fmad=false"});
    if (c.result != NvrtcResult::kSuccess) throw std::runtime_error(c.log);
    found = c.cubin;
  }
  return found;
}

int run_program(const std::function<int(const Kernels&)>& program, const std::string& cubin) {
  try {
    start();
    return program(Kernels::of_image(cubin));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "threw %s\n", e.what());
    return 3;
  }
}

}  // namespace

Outcome in_child(bool checked, const std::map<std::string, std::string>& environment,
                 const std::function<int(const Kernels&)>& program) {
  const std::string& cubin = image(checked);
  std::array<int, 2> ends;
  if (pipe(ends.data())) std::abort();
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[1], 2);
    setenv("VGPU_CHECK", checked ? "1" : "0", 1);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    alarm(60);
    const int status = run_program(program, cubin);
    std::fflush(nullptr);
    _exit(status);
  }
  close(ends[1]);
  Outcome outcome;
  std::array<char, 4096> buffer;
  for (ssize_t n; (n = read(ends[0], buffer.data(), buffer.size())) > 0;)
    outcome.said.append(buffer.data(), static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  outcome.status = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  return outcome;
}

void expect_found(bool checked, const std::string& words,
                  const std::function<int(const Kernels&)>& program,
                  std::map<std::string, std::string> environment) {
  for (const char* seed : {"late", "eager", "5"}) {
    environment["VGPU_SEED"] = seed;
    const Outcome o = in_child(checked, environment, program);
    EXPECT_NE(o.said.find(words), std::string::npos)
        << "seed " << seed << ": not '" << words << "' but '" << o.said << "', status " << o.status;
  }
}

void expect_right(const std::function<int(const Kernels&)>& program) {
  for (const bool checked : {false, true})
    for (const char* seed : {"late", "eager", "1", "2"}) {
      const Outcome o = in_child(checked, {{"VGPU_SEED", seed}}, program);
      EXPECT_EQ(o.status, 0) << "seed " << seed << (checked ? ", checked: " : ": ") << o.said;
      EXPECT_EQ(o.said, "") << "seed " << seed;
    }
}

}  // namespace vgpu_test
