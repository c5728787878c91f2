// The program `train` as a function, for programs that first register models of their own:
//
//   int main(int argc, char** argv) {
//     tessera::models::register_model({.name = "mine", ...});  // examples/models/registry.h
//     return tessera::train_main(argc, argv);
//   }
#pragma once

namespace tessera {

/// Runs `train` with these arguments, on one rank or under tlaunch. Returns the exit status after
/// printing errors. If a signal ended the run after saving, ends the process by that signal.
int train_main(int argc, char** argv);

}  // namespace tessera
