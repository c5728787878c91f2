// Which results generated code stores past the caches. An ordinary store first reads the line that
// it writes to; where the line comes from DRAM and goes back there, a kernel that reads one array
// and writes one moves three. A streaming store moves two, but leaves nothing in the caches for who
// reads the result next. So it is for results that the last-level cache cannot hold until then:
// when the last of such a result is written, its first lines are gone. And not for results that lie
// over an operand, which is known when the kernel runs: their lines have been read anyway. Nor for
// results whose rows keep what is costly to compute until it is finished (softmax) and fit in L1:
// such a kernel computes for longer than memory needs, which ordinary stores hide better.
#pragma once
#include <cstdint>

namespace tessera::compiler {

/// Results of at least so many bytes are streamed: the size of the last-level cache as the system
/// tells it (32 MiB where it does not), or TESSERA_COMPILE_STREAM. Throws UserError when that is no
/// number of bytes.
int64_t streamed_from();

}  // namespace tessera::compiler
