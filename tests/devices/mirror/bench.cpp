// `bench` with one more device: --device mirror.
#include "examples/bench/bench_main.h"
#include "mirror.h"

int main(int argc, char** argv) {
  mirror::device();
  return tessera::bench_main(argc, argv);
}
