// Single operations to time, shared by `bench ops` and `bench serve`. Invariant: a batch does the
// named work and nothing else.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "dtensor/dtensor.h"

namespace tessera::bench {

using Batch = std::function<void(int64_t calls)>;  // does the work `calls` times

struct Case {
  std::string name;
  std::function<Batch()>
      prepare;       // makes what the work needs; large cases hold memory while their batch lives
  double bytes = 0;  // least traffic of one call: operands read once, results written once
  double flops = 0;  // of one call, for contractions
};

/// Small ops, whose cost is that of dispatch: 16 values, 0-d, views.
std::vector<Case> small_cases();
/// The same ops on sharded tensors, with cached decisions; none of them communicates.
std::vector<Case> sharded_cases(const DeviceMesh& mesh);
/// Loops over large tensors, and over some that stay in the L2 cache.
std::vector<Case> throughput_cases();
/// Contractions: squares, and the shapes of a gpt-nano step.
std::vector<Case> matmul_cases();

/// Forward and backward of cross-entropy over [rows, 50304] logits; the gradient is new each time.
Case cross_entropy_case(int64_t rows);
/// One AdamW step over the 148 tensors, 124.5 M values, of GPT-2 small (vocabulary 50304).
Case adamw_case();

}  // namespace tessera::bench
