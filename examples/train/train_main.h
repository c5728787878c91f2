// The program `train` as a function, for programs that register models of their own first:
//
//   int main(int argc, char** argv) {
//     tessera::models::register_model({.name = "mine", ...});  // examples/models/registry.h
//     return tessera::train_main(argc, argv);
//   }
#pragma once

namespace tessera {

/// Runs `train` with these arguments, on one rank or under tlaunch. Returns the exit status; errors
/// have been printed. A run that a signal ended after saving ends the process by that signal.
int train_main(int argc, char** argv);

}  // namespace tessera
