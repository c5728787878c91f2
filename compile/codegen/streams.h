// Which results generated code streams, that is, stores past the caches. An ordinary store first
// reads the cache line that it writes to; where lines come from DRAM and go back there, a kernel
// that reads one array and writes one moves three. A streaming store moves two, but leaves nothing
// in the caches for the next reader of the result. So results are streamed if the last-level cache
// could not hold them until then anyway: by the time the last line is written, the first lines are
// gone. Results that lie over an operand are not streamed (this is known when the kernel runs),
// since their lines have been read anyway. Nor are results whose rows hold costly values until the
// row is finished (softmax) and fit into L1: such a kernel computes for longer than memory needs,
// and ordinary stores hide that better.
#pragma once
#include <cstdint>

namespace tessera::compiler {

/// The least number of bytes of a result that is streamed: TESSERA_COMPILE_STREAM, or the size of
/// the last-level cache as the system reports it (32 MiB where it does not). Throws UserError when
/// the variable is no number of bytes.
int64_t streamed_from();

}  // namespace tessera::compiler
