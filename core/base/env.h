// Environment variables: one table names every variable Tessera reads, with its default and its
// meaning (`tlaunch --help` prints it). Invariant: a value that does not parse is an error that
// names the variable (an unknown TESSERA_LOG is only warned of); nothing is guessed.
#pragma once
#include <cstdint>
#include <span>
#include <string>

namespace tessera::env {

struct Variable {
  const char* name;
  const char* fallback;  // shown in help; "" = unset
  const char* meaning;
};

/// Every variable that Tessera reads.
std::span<const Variable> table();

/// Value of `name`, or `fallback` when it is unset or empty. Throws BugError for a name that
/// table() lacks.
std::string get(const char* name, const std::string& fallback = "");

/// Integer value of `name` within [low, high], or `fallback` when unset. Throws UserError naming
/// variable and value.
int64_t get_int(const char* name, int64_t fallback, int64_t low, int64_t high);

/// Seconds above 0, at most 1e7, or `fallback` when unset. Throws UserError naming variable and
/// value.
double get_seconds(const char* name, double fallback);

}  // namespace tessera::env
