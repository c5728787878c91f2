#include "compile/passes/loops.h"

namespace tessera::compiler {

int Loops::add(int64_t extent) {
  loops_.push_back({extent, {}});
  return int(loops_.size()) - 1;
}

void Loops::leaves(int loop, Product& out) const {
  const Loop& l = loops_[size_t(loop)];
  if (l.extent == 1) return;
  if (l.parts.empty()) return out.push_back(loop);
  for (int part : l.parts) leaves(part, out);
}

Product Loops::leaves(const Product& p) const {
  Product out;
  for (int loop : p) leaves(loop, out);
  return out;
}

std::pair<int, int> Loops::split(int loop, int64_t inner) {
  int a = add(extent(loop) / inner), b = add(inner);
  loops_[size_t(loop)].parts = {a, b};
  return {a, b};
}

// Works from the innermost loops outwards: of two loops, the smaller extent must divide the larger.
bool Loops::unify(const Product& a, const Product& b) {
  Product x = leaves(a), y = leaves(b);
  while (!x.empty() && !y.empty()) {
    int p = x.back(), q = y.back();
    x.pop_back(), y.pop_back();
    if (p == q) continue;
    if (extent(p) == extent(q)) {
      loops_[size_t(q)].parts = {p};
    } else {
      bool p_larger = extent(p) > extent(q);
      int large = p_larger ? p : q, small = p_larger ? q : p;
      if (extent(large) % extent(small) != 0) return false;
      auto [outer, inner] = split(large, extent(small));
      loops_[size_t(small)].parts = {inner};
      (p_larger ? x : y).push_back(outer);
    }
    x = leaves(x), y = leaves(y);  // a loop that was bound may occur further out
  }
  return x.empty() && y.empty();
}

bool Loops::unify(const DimProducts& a, const DimProducts& b) {
  if (a.size() != b.size()) return false;
  for (size_t d = 0; d < a.size(); ++d)
    if (!unify(a[d], b[d])) return false;
  return true;
}

}  // namespace tessera::compiler
