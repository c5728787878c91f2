// A second way to compute every op: cut along its loops into parts that are shorter than any limit
// of a kernel, in the op's own terms (axes, localize), or by its decomposition where no loop may be
// cut. What an op is on small operands the sweeps over the registry show; this shows what it must
// be on large ones.
#pragma once
#include <set>
#include <string>

#include "core/dispatch/target.h"

namespace tessera::test {

/// While one lives, ops of the calling thread are computed so, those of backward included.
class InParts final : public Backend {
 public:
  /// Loops are cut until they are at most `longest`.
  explicit InParts(int64_t longest = 13) : longest_(longest), on_({.backend = this}) {}
  Tensors run(const PrimRef& prim, Inputs in) override;
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override;
  /// Ops that had a loop longer than `longest` which nothing could cut: computed as they are.
  const std::set<std::string, std::less<>>& whole() const { return whole_; }
  /// Ops that were called with more than a thousand elements, views aside.
  const std::set<std::string, std::less<>>& large() const { return large_; }

 private:
  struct Call {  // an op on all of its operands
    const PrimRef& prim;
    const std::vector<Tensor>& in;
    AxisMap map;
  };
  Tensors run_in(const PrimRef& prim, const std::vector<Tensor>& in);
  /// The call where only `loops` of it are computed.
  Tensors part(const Call& call, const std::vector<Range>& loops);
  /// An op on operands that no loop of the op cuts further.
  Tensors run_whole(const PrimRef& prim, const std::vector<Tensor>& in);
  Tensors cut_reduction(const PrimRef& prim, const std::vector<Tensor>& in);

  int64_t longest_;
  bool inside_ = false;  // an op is being computed: what computes it was not called by the program
  std::set<std::string, std::less<>> whole_, large_;
  BackendScope on_;
};

}  // namespace tessera::test
