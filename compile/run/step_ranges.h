// Which steps of a program are captured as graphs of their device (captured_steps.h).
// Internal: not part of the public interface.
#pragma once
#include "compile/run/program.h"

namespace tessera::compiler {

/// Whether steps on `d` are captured: the device can, and TESSERA_COMPILE_CAPTURE is not 0. All
/// their operands are then on the device, numbers of the host too.
bool captures_steps(Device d);

/// Fills in p.ranges, and joins neighbours of p.copies: numbers that steps of a range read are
/// copied before it, in one go. Nothing of the host runs within a range. To be called after a run:
/// the first collectives on cards decide whether theirs can be captured.
void find_ranges(Program& p);

/// A hash of which calls of `group` on `device` lie in ranges, and which of them in one. Ranks of
/// the group must have equal ones, since they decide together on each range that has such calls
/// (range_ranks.h). 0: there is no range.
uint64_t hash_of_cuts(const Program& p, const ProcessGroup& group, Device device);

}  // namespace tessera::compiler
