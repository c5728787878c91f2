#include "compile/codegen/toolchain.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "core/base/env.h"
#include "core/base/error.h"
#include "core/base/isa.h"
#include "core/io/file.h"

extern char** environ;

namespace tessera::compiler {
namespace {

// Compiles for this machine, or for the instruction set that TESSERA_ISA names, so that the code of
// other machines can be tested here.
const char* architecture() {
  const bool asked = !env::get("TESSERA_ISA").empty();
  switch (cpu::current_isa()) {
#if defined(__x86_64__)
    case cpu::Isa::kBase: return asked ? "-march=x86-64" : "-march=native";
    case cpu::Isa::kV3: return asked ? "-march=x86-64-v3" : "-march=native";
#endif
    default: return "-march=native";
  }
}

// Without this GCC would turn loops that copy to lanes into memcpy, which goes through memory.
// Clang does not know the flag.
constexpr const char* kOfGcc = "-fno-tree-loop-distribute-patterns";

// The flags of the core's kernels, but for this machine. Contraction and reassociation stay off, so
// that results have the bits of the ops run one by one.
const std::vector<std::string>& flags() {
  static const std::vector<std::string> list {
    "-std=c++20", "-O3", architecture(),
#if defined(__x86_64__)
        "-mprefer-vector-width=512",
#endif
        "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fPIC",
        "-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables", "-w"
  };
  return list;
}

bool is_program(const std::string& path) {
  struct stat s;
  return stat(path.c_str(), &s) == 0 && S_ISREG(s.st_mode) && access(path.c_str(), X_OK) == 0;
}

// Returns "" when PATH has no such program.
std::string search_path(const std::string& name) {
  if (name.find('/') != name.npos) return is_program(name) ? name : "";
  const char* path = std::getenv("PATH");
  std::string rest = path ? path : "/usr/local/bin:/usr/bin:/bin";
  for (size_t at = 0; at <= rest.size();) {
    size_t end = std::min(rest.find(':', at), rest.size());
    std::string candidate = rest.substr(at, end - at) + "/" + name;
    if (is_program(candidate)) return candidate;
    at = end + 1;
  }
  return "";
}

// The description of the processor that -march=native depends on.
std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  std::string text, line;
  while (std::getline(info, line) && !line.empty())
    for (const char* key : {"vendor_id", "cpu family", "model", "stepping", "flags", "Features",
                            "CPU implementer", "CPU architecture", "CPU variant", "CPU part"})
      if (line.starts_with(key)) {
        text += line + "\n";
        break;
      }
  return text;
}

struct Child {
  pid_t pid = -1;
  std::string log;
  int status = 0;
};

// Starts `command` in process group `group` (0: a new one). It reads from `input` (-1: nothing).
Child start(const std::vector<std::string>& command, const std::string& log, pid_t group,
            int input = -1) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  if (input < 0)
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  else
    posix_spawn_file_actions_adddup2(&files, input, 0);
  posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  // The child does not join this program's process group: Ctrl-C is meant for this program, which
  // may still have work to finish.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, group);
  Child child{-1, log, 0};
  int error = posix_spawn(&child.pid, argv[0], &files, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  TESSERA_CHECK(error == 0,
                "codegen: {} does not start: {}; a compiler is set by TESSERA_COMPILE_CXX",
                command[0], std::strerror(error));
  return child;
}

bool succeeded(Child& child) {
  while (waitpid(child.pid, &child.status, 0) < 0)
    if (errno != EINTR) return false;
  return WIFEXITED(child.status) && WEXITSTATUS(child.status) == 0;
}

std::string how(const Child& child) {
  return WIFSIGNALED(child.status) ? fmt::format("signal {} ({})", WTERMSIG(child.status),
                                                 strsignal(WTERMSIG(child.status)))
                                   : fmt::format("exit status {}", WEXITSTATUS(child.status));
}

std::string head_of(const std::string& path) {
  constexpr size_t kShown = 2000;
  std::string text;
  std::getline(std::ifstream(path), text, '\0');
  return text.size() > kShown ? text.substr(0, kShown) + "..." : text;
}

// A process group for compilers and what they start. It does not outlive this process, however that
// ends: the group's leader waits for the end of a pipe and then kills the group.
class CompilerGroup {
 public:
  explicit CompilerGroup(const std::string& work) : CompilerGroup() {
    leader_ = start({"/bin/sh", "-c", "read line; kill -KILL 0"}, work + "/group.log", 0, pipe_[0]);
  }
  ~CompilerGroup() {
    if (leader_.pid > 0) kill(-leader_.pid, SIGKILL), succeeded(leader_);
    for (int fd : pipe_) close(fd);
  }
  CompilerGroup(const CompilerGroup&) = delete;
  CompilerGroup& operator=(const CompilerGroup&) = delete;
  pid_t group() const { return leader_.pid; }

 private:
  CompilerGroup() {
    TESSERA_CHECK(pipe2(pipe_, O_CLOEXEC) == 0, "codegen: no pipe: {}", std::strerror(errno));
  }
  int pipe_[2] = {-1, -1};
  Child leader_;
};

// Asks the compiler for its macros, since its name does not tell whether it is Clang.
bool is_clang(const std::string& compiler, const std::string& work, pid_t group) {
  const std::string log = work + "/macros.log";
  Child asked = start({compiler, "-dM", "-E", "-x", "c++", "/dev/null"}, log, group);
  succeeded(asked);  // a compiler that fails here explains itself on the sources
  std::string macros;
  std::getline(std::ifstream(log), macros, '\0');
  return macros.find("#define __clang__ ") != macros.npos;
}

// Waits for all children, also when one fails: none may go on writing to a folder that is removed.
void wait_for(std::vector<Child>& children, const std::string& compiler, const std::string& work) {
  const Child* failed = nullptr;
  for (Child& c : children)
    if (!succeeded(c) && !failed) failed = &c;
  if (!failed) return;
  const std::string said = head_of(failed->log);
  throw UserError(fmt::format("codegen: {} failed on {} ({}): {}", compiler, work, how(*failed),
                              said.empty() ? "it said nothing; is the disk full?" : said));
}

}  // namespace

Toolchain find_toolchain(const std::string& compiler) {
  std::string asked = compiler.empty() ? env::get("TESSERA_COMPILE_CXX") : compiler, found;
  if (!asked.empty()) {
    found = search_path(asked);
    TESSERA_CHECK(!found.empty(), "codegen: no compiler {}; correct TESSERA_COMPILE_CXX", asked);
  } else {
    for (const char* name : {"c++", "g++", "clang++"})
      if (found.empty()) found = search_path(name);
    TESSERA_CHECK(!found.empty(),
                  "codegen: no C++ compiler (c++, g++, clang++) on PATH; install one or set "
                  "TESSERA_COMPILE_CXX");
  }
  struct stat s = {};
  stat(found.c_str(), &s);
  char resolved[PATH_MAX];
  Toolchain t{found,
              fmt::format("{} {} {}.{}", realpath(found.c_str(), resolved) ? resolved : found,
                          s.st_size, s.st_mtim.tv_sec, s.st_mtim.tv_nsec)};
  for (const std::string& f : flags()) t.description += " " + f;
  t.description += fmt::format(" {}\n", kOfGcc) + processor();
  return t;
}

void compile_shared(const Toolchain& toolchain, const std::vector<std::string>& sources,
                    const std::string& work, const std::string& object) {
  const bool one = sources.size() == 1;
  const CompilerGroup group(work);
  const bool clang = is_clang(toolchain.compiler, work, group.group());
  std::vector<std::string> link{toolchain.compiler, "-shared", "-nostdlib", "-o", object};
  std::vector<Child> children;
  for (size_t i = 0; i < sources.size(); ++i) {
    std::string stem = fmt::format("{}/kernels{}", work, i);
    std::ofstream(stem + ".cpp") << sources[i];
    std::vector<std::string> command{toolchain.compiler};
    command.insert(command.end(), flags().begin(), flags().end());
    if (!clang) command.push_back(kOfGcc);
    command.push_back(stem + ".cpp");
    if (one)
      command.insert(command.end(), link.begin() + 1, link.end());
    else
      command.insert(command.end(), {"-c", "-o", stem + ".o"});
    link.push_back(stem + ".o");
    children.push_back(start(command, stem + ".log", group.group()));
  }
  wait_for(children, toolchain.compiler, work);
  if (one) return;
  children = {start(link, work + "/link.log", group.group())};
  wait_for(children, toolchain.compiler, work);
}

int available_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace tessera::compiler
