// Finds the program before anything is started, so that a typing error costs one line.
#pragma once
#include <string>

#include "core/base/error.h"

namespace tessera::launcher {

/// The error that the program cannot be run; exit_code() is the shell's: 127 not found, 126 not
/// executable.
class ProgramError : public UserError {
 public:
  ProgramError(const std::string& text, int exit_code) : UserError(text), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

/// Returns the path of `name`: `name` itself when it has a slash, else the first executable of that
/// name on PATH, beside tlaunch, or in the current directory. Throws ProgramError.
std::string find_program(const std::string& name);

/// The folder that tlaunch itself is in.
std::string own_folder();

}  // namespace tessera::launcher
