// The limit of open files (ulimit -n) is checked before it is reached: a program that reached it
// halfway might be in a library that retries, or that says no more than "Too many open files".
#pragma once
#include <string_view>

namespace tessera {

/// Throws UserError unless this process can open `more` files: "train: too many open files: the
/// limit is 8 (ulimit -n), ...". `what` names what they are for.
void check_open_files(std::string_view what, int more);

}  // namespace tessera
