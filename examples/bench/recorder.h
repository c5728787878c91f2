// Sees every op at the bottom of the dispatch path: a backend that passes each op on to the eager
// one and notes its name, its time without the ops that it ran inside, and the matrix products and
// convolutions that it stands for. Invariant: products inside an attention op are counted once, as
// the attention's own, whichever kernel or decomposition ran it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/dispatch/backend.h"
#include "examples/bench/contractions.h"

namespace tessera::bench {

struct OpTime {
  int64_t calls = 0;
  double seconds = 0;  // without nested ops
};

class RecordingBackend final : public Backend {
 public:
  Tensors run(const PrimRef& prim, Inputs in) override;
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override;

  void clear();
  /// The times by op, without attributes and shapes.
  const std::map<std::string, OpTime>& times() const { return times_; }
  /// The times by op with the operands' shapes.
  const std::map<std::string, OpTime>& detailed_times() const { return detailed_; }
  const Contractions& contractions() const { return contractions_; }

 private:
  class Frame;
  void note_contractions(const Primitive& prim, Inputs in);
  std::map<std::string, OpTime> times_, detailed_;
  Contractions contractions_;
  Frame* inner_ = nullptr;
  int attention_depth_ = 0;
};

}  // namespace tessera::bench
