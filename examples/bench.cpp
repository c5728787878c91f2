// Measures this machine and Tessera on it; see bench --help.
#include "examples/bench/bench_main.h"

int main(int argc, char** argv) { return tessera::bench_main(argc, argv); }
