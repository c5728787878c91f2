// `train` with one more device: --device mirror.
#include "examples/train/train_main.h"
#include "mirror.h"

int main(int argc, char** argv) {
  mirror::device();
  return tessera::train_main(argc, argv);
}
