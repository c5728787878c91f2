#include "core/base/deterministic.h"

namespace tessera {
namespace {

thread_local bool deterministic = false;

}  // namespace

void use_deterministic_algorithms(bool on) { deterministic = on; }
bool deterministic_algorithms() { return deterministic; }

}  // namespace tessera
