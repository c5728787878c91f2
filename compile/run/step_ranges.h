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

}  // namespace tessera::compiler
