// Where the memories of a program lie in its arenas, and whether ranks lay alike what collectives
// use on a device. A group's own memory there is good for what is at the same place on all ranks,
// and for nothing else: where plans differ, as shapes do, NCCL would write elsewhere.
// Internal: not part of the public interface.
#pragma once
#include "compile/run/program.h"

namespace tessera::compiler {

/// Lays out the groups' arenas first: ordinary memory that fits into their gaps costs nothing.
void lay_out_arenas(Program& program);
/// Called by all ranks of the program's groups, before they allocate its arenas; a program that is
/// alone asks nobody, and has ordinary memory. Arenas in groups'
/// own memory of devices that are not alike become ordinary memory, which rank 0 says once.
void agree_on_arenas(Program& program);

}  // namespace tessera::compiler
