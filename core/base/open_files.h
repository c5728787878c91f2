// The limit of open files (ulimit -n), looked at before it is reached: whoever meets it halfway may
// be in a library that retries, or says no more than "Too many open files".
#pragma once
#include <string_view>

namespace tessera {

/// Throws UserError unless this process can open `more` files: "train: too many open files: the
/// limit is 8 (ulimit -n), ...", with `what` for whom they are.
void check_open_files(std::string_view what, int more);

}  // namespace tessera
