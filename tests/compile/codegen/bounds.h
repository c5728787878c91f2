// How far a result of generated code may be from the interpreter's: not at all, except where the
// order of sums and the exponentials of a softmax leave results open, which is followed through all
// that reads them.
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
