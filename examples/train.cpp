// Trains a model: the program that users start with, and the workload of the benchmarks. See train
// --help.
#include "examples/train/train_main.h"
#include "launcher/process_threads.h"

int main(int argc, char** argv) {
  tessera::settle_threads(argv);
  return tessera::train_main(argc, argv);
}
