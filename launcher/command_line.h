// The parser that tlaunch, train, bench and tckpt share. `--a_b` means `--a-b`. Invariant: a value
// is never taken for a flag nor a flag for a value, and every error is one line that names the flag
// or command, what is wrong with it, and where to look it up.
#pragma once
#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Parses the arguments into the variables that `app` was given. Returns the exit status when the
/// program should end: 0 after printing what --help or --version asks for, `usage_status` after
/// printing an error. Numbers are checked by their type; those that are out of range or not finite
/// are refused. A value may be empty only where its option has a type name in brackets, as in
/// "[TEXT]". `command` gets the first argument that is neither a flag nor the value of one, or what
/// follows `--`, with everything after it; nullptr: there is no such command.
std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv, int usage_status,
                                      std::vector<std::string>* command = nullptr);

/// Prints one line about a wrong command line. Under tlaunch all ranks have the same one, so only
/// rank 0 prints it, or another rank if rank 0 has not failed a second later.
void print_usage_error(const std::string& line);

}  // namespace tessera
