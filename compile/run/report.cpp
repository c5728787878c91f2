#include "compile/run/report.h"

#include <fmt/core.h>

namespace tessera::compiler {
namespace {

std::string megabytes(size_t bytes) { return fmt::format("{:.2f} MB", double(bytes) / 1e6); }

}  // namespace

std::string report(const Executor& executor) {
  const Traffic& t = executor.traffic();
  const MemoryPlan& m = executor.memory();
  std::string text = fmt::format(
      "kernels        {}, {} read and written\n"
      "collectives    {}, {}\n"
      "peak memory    {} (arena {}, outputs {}) beside {} of state; {} without sharing\n",
      t.kernels, megabytes(t.kernel_bytes), t.collectives, megabytes(t.collective_bytes),
      megabytes(m.arena_bytes + m.output_bytes), megabytes(m.arena_bytes),
      megabytes(m.output_bytes), megabytes(m.implicit_bytes), megabytes(m.unplanned_bytes));
  if (executor.device_graphs())
    text += fmt::format("device graphs  {} in the last run\n", executor.device_graphs());
  if (m.eager_nodes)
    text += fmt::format("eager          {} ops without a kernel run their decomposition\n",
                        m.eager_nodes);
  return text;
}

}  // namespace tessera::compiler
