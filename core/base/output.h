// Standard output of a program: what cannot be written is an error, not a silence, unless its
// reader has left.
#pragma once

namespace tessera {

/// For the begin of main(). A file that grows past its limit (ulimit -f) is an error of the write
/// from here on, not the end of the program. Where standard input, output or error is closed, its
/// number would be that of the next file which the program opens, which would then get what it
/// prints. Afterwards a closed input is at its end, and a write to a closed output fails.
void reserve_standard_streams();

/// For the end of main(). Throws UserError unless everything that was printed to standard output,
/// now and earlier, went out: "standard output: cannot write it: No space left on device". A reader
/// that has left (`train | head`, a terminal that was closed) is no error: where SIGPIPE is not
/// ignored it has ended the program before.
void check_output();

}  // namespace tessera
