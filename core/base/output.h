// Standard output of a program: output that cannot be written is an error, unless its reader has
// left.
#pragma once

namespace tessera {

/// Called at the beginning of main(). From here on a file that grows past its limit (ulimit -f) is
/// an error of the write, not the end of the program. A standard input, output or error that is
/// closed gets /dev/null in its place, so that no file which the program opens later has its number
/// and receives what the program prints: a closed input is then at its end, and a write to a closed
/// output fails.
void reserve_standard_streams();

/// Called at the end of main(). Throws UserError unless everything that was printed to standard
/// output, now and earlier, was written: "standard output: cannot write it: No space left on
/// device". A reader that has left (`train | head`, a terminal that was closed) is no error: where
/// SIGPIPE is not ignored it has ended the program before.
void check_output();

}  // namespace tessera
