// Programs run from tests: started through a shell, as a user would.
#pragma once
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace tessera {

struct Outcome {
  int status;          // 128 + n for a signal
  std::string output;  // of stdout and stderr
};

/// Path of a program of this build, from TESSERA_BIN.
inline std::string bin(const std::string& program) {
  const char* folder = std::getenv("TESSERA_BIN");
  return std::string(folder ? folder : "build/bin") + "/" + program;
}

inline Outcome run(const std::string& command) {
  std::FILE* pipe = popen(("{ " + command + "; } 2>&1").c_str(), "r");
  std::string output;
  std::array<char, 4096> buffer;
  while (size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe))
    output.append(buffer.data(), n);
  int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), output};
}

}  // namespace tessera
