#include "examples/bench/commands.h"
namespace tessera::bench {
void add_roofline(CLI::App&, Run&) {}
void add_ops(CLI::App&, Run&) {}
void add_collectives(CLI::App&, Run&) {}
void add_scaling(CLI::App&, Run&) {}
void add_serve(CLI::App&, Run&) {}
}  // namespace tessera::bench
