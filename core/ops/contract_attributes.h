// Attributes of products, as kernels read them.
#pragma once
#include "core/primitive/attributes.h"

namespace tessera {

/// The letters of an einsum of two operands; each letter of an operand is in the other or in the
/// result. With `leaves` 0 the sum has the order that is fastest. Otherwise the summed letters, in
/// the order of `a`, are one loop, cut into leaves_of(extent) equal leaves; each leaf is one chain
/// of fused multiply-adds per element of the result, and leaves are added in a balanced tree.
struct ContractAttributes {
  std::string a = {}, b = {}, out = {};
  int64_t leaves = 0;

  /// "ij,jk->ik".
  std::string spec() const { return a + "," + b + "->" + out; }
  /// The largest power of two up to `leaves` that divides `extent` (at least 1).
  int64_t leaves_of(int64_t extent) const {
    int64_t n = 1;
    while (2 * n <= leaves && extent % (2 * n) == 0) n *= 2;
    return n;
  }

  /// Throws UserError where `spec` is not of that form.
  void parse(const std::string& spec);

  /// Writes the three words as one text.
  static void spec_field(const ContractAttributes& c, FieldWriter& f) { f("spec", c.spec()); }
  static void spec_field(ContractAttributes& c, FieldReader& f) {
    c.parse(f.reader().text("spec"));
  }
  static void fields(auto& a, auto& f) { spec_field(a, f), f.optional("leaves", a.leaves); }
};

}  // namespace tessera
