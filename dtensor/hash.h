// A running hash of what decisions depend on. It does not resist attacks.
#pragma once
#include "dtensor/placement.h"

namespace tessera {

class Hash {
 public:
  void add(uint64_t v) { h_ = (h_ ^ v) * 0x9e3779b97f4a7c15, h_ ^= h_ >> 32; }
  void add(const Dims& dims) {
    add(uint64_t(dims.size()));
    for (int64_t e : dims) add(uint64_t(e));
  }
  void add(const Layout& layout) {
    for (const Placement& p : layout)
      add(uint64_t(p.unit) << 32 | uint64_t(uint8_t(p.dim)) << 16 | uint64_t(p.op) << 8 | p.kind);
  }
  uint64_t value() const { return h_; }

 private:
  uint64_t h_ = 0x243f6a8885a308d3;
};

}  // namespace tessera
