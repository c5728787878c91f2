// How far from the interpreter's a result of generated code may be: not at all, but for what sums
// in another order and exponentials of a softmax leave open, followed through all that reads them.
#pragma once
#include "compile/codegen/body.h"

namespace tessera::test {

struct Bounded {
  Tensor value;  // as the interpreter has it, with a dim for each loop
  Tensor error;  // f64 [like value]: the largest difference, infinite where anything may come;
                 // undefined: the bits are known, but for those of NaN
  bool rounded() const { return error.defined(); }
};

/// By store of `body`.
std::vector<Bounded> bounds_of(const compiler::Body& body, std::span<const Tensor> in);

/// "" when `memory`, the result of store `k`, holds values within `bounds`; else what differs.
/// Adds to `unknown` the elements that nothing is known of, to `all` all of them.
std::string outside(const compiler::Body& body, size_t k, const Bounded& bounds,
                    const Tensor& memory, int64_t& unknown, int64_t& all);

}  // namespace tessera::test
