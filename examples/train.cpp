// Trains a model: the program users start with, and the benchmarks' workload. See train --help.
#include "examples/train/train_main.h"

int main(int argc, char** argv) { return tessera::train_main(argc, argv); }
