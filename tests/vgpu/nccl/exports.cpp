// The library has every function of the tables: this list does not link otherwise, and a definition
// that differs from its row does not compile. It exports vgpu_emulation as the others do.
#include "tests/vgpu/nccl/comm.h"

namespace tessera::nccl {

extern "C" {

#define FUNCTION(member, symbol, parameters) Result symbol parameters;
#include "collectives/nccl/functions.def"
#include "collectives/nccl/optional_functions.def"
#include "collectives/nccl/window_functions.def"
#undef FUNCTION

__attribute__((used)) void* const vgpu_nccl_exported[] = {
#define FUNCTION(member, symbol, parameters) reinterpret_cast<void*>(&symbol),
#include "collectives/nccl/functions.def"
#include "collectives/nccl/optional_functions.def"
#include "collectives/nccl/window_functions.def"
#undef FUNCTION
};
const char* vgpu_emulation() { return "nccl"; }
}

}  // namespace tessera::nccl
