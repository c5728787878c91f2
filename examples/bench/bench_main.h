// The program `bench` as a function, for programs that first register a device of their own, which
// `bench ops --device NAME` then measures.
#pragma once

namespace tessera {

/// Runs `bench` with these arguments. Returns the exit status after printing errors.
int bench_main(int argc, char** argv);

}  // namespace tessera
