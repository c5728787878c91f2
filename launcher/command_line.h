// What the command lines of tlaunch, train, bench and tckpt share. `--a_b` is `--a-b`. Invariant:
// a value is never taken for a flag nor a flag for a value, and whatever is wrong is one line that
// says which flag or command, what is wrong with it, and where to look it up.
#pragma once
#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Parses the arguments into what `app` was given. Returns the exit status when nothing is left to
/// do: 0 after printing what --help or --version asks for, `usage_status` after printing an error.
/// Numbers are checked by their type, out of range and not finite ones are refused; a value may be
/// empty only where its option has a type name in brackets, as in "[TEXT]".
/// `command`: gets the first argument that is neither a flag nor the value of one, or what follows
/// `--`, with all that is behind it; nullptr: there is no such command.
std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv, int usage_status,
                                      std::vector<std::string>* command = nullptr);

/// Prints one line about a command line that is wrong, once for all ranks under tlaunch, which have
/// the same one: rank 0 does, and another rank only where rank 0 has not failed a second later.
void print_usage_error(const std::string& line);

}  // namespace tessera
