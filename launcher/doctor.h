// tlaunch --doctor: checks what training on this machine needs and says, for each finding, what to
// do.
#pragma once

namespace tessera::launcher {

/// Prints the findings to stdout; returns 0 when nothing has to be fixed, else 1.
int run_doctor();

}  // namespace tessera::launcher
