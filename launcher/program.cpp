#include "launcher/program.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>

namespace tessera::launcher {
namespace {

/// Returns 0 when `path` is an executable file, else the exit code that says why not.
int why_not(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return errno;
  if (!S_ISREG(info.st_mode)) return EISDIR;
  return ::access(path.c_str(), X_OK) == 0 ? 0 : errno;
}

}  // namespace

std::string own_folder() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    int error = why_not(name);
    if (error == 0) return name;
    const char* advice = error == EACCES   ? "make it executable with chmod +x"
                         : error == EISDIR ? "name a file"
                                           : "check the path";
    throw ProgramError(
        fmt::format("{}: cannot be run ({}); {}", name, std::strerror(error), advice),
        error == EACCES || error == EISDIR ? 126 : 127);
  }
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "/usr/local/bin:/usr/bin:/bin");
  std::string denied;
  auto usable = [&](const std::string& candidate) {
    int error = why_not(candidate);
    if (error == EACCES) denied = candidate;
    return error == 0;
  };
  for (std::string folder; std::getline(folders, folder, ':');) {
    std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    if (usable(candidate)) return candidate;
  }
  std::string beside = own_folder() + "/" + name;
  if (usable(beside)) return beside;
  if (usable("./" + name)) return "./" + name;
  if (!denied.empty())
    throw ProgramError(
        fmt::format("{}: is not executable; make it so with chmod +x {}", name, denied), 126);
  throw ProgramError(fmt::format("{}: no such program on PATH, in {} or in the current directory; "
                                 "give its path",
                                 name, own_folder()),
                     127);
}

}  // namespace tessera::launcher
