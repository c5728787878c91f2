// Environment variables: one table names every variable Tessera reads, with its default and its
// meaning (`--help` prints it). Invariant: a value that does not parse is an error that names the
// variable; nothing is guessed.
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

/// True for 1/true/on/yes, false for 0/false/off/no; throws UserError otherwise.
bool get_bool(const char* name, bool fallback);

}  // namespace tessera::env
