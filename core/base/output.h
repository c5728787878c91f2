// Standard output of a program: what cannot be written is an error, not a silence.
#pragma once

namespace tessera {

/// For the end of main(). Throws UserError unless everything that was printed to standard output,
/// now and earlier, went out: "standard output: cannot write it: No space left on device".
void check_output();

}  // namespace tessera
