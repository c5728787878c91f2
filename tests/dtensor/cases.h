// Compares ops on sharded operands with the same ops on plain ones; the tests of this folder share
// it.
#pragma once
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "dtensor/dtensor.h"

namespace tessera::test {

using List = std::vector<Tensor>;
using Random = std::mt19937_64;

int64_t pick(Random& random, int64_t low, int64_t high);  // both included

/// Meshes of `ranks` ranks with one to three axes, in every order of factors.
std::vector<std::vector<MeshAxis>> meshes_of(int ranks);
std::vector<DeviceMesh> make_meshes(ProcessGroup& group);

/// A layout that fits `shape`: shards with random units, Replicate and, where `partial`, Partial.
Layout random_layout(Random& random, const Shape& shape, const DeviceMesh& mesh, bool partial);

/// `value` (the same on every rank) in `layout`. Terms of a Partial axis differ from rank to rank.
Tensor place(const Tensor& value, const DeviceMesh& mesh, const Layout& layout);

/// One op with operands.
struct Case {
  std::string name;
  List in;
  std::function<List(const List&)> run;
  bool smooth = true;       // gradients are compared too
  bool may_refuse = false;  // cuts of a sum, with ShapeError: exact contraction
  bool any_cuts = false;    // one operand, which the op takes however it is cut
  /// How far results and gradients may be off, as a part of the largest; null: what sums of a
  /// few terms need.
  std::function<double(DType)> tolerance = {};
  int64_t terms = 1;  // of the longest sum behind an element
};
/// Every sample of the registry that has operands.
std::vector<Case> registry_cases();
/// An op of a common family on random shapes.
Case random_case(Random& random);

/// Throws BugError naming `what` and the first element that differs by more than `tolerance` times
/// the largest magnitude (at least 1). NaN equals NaN. Values of integers are equal.
void check_close(const Tensor& got, const Tensor& want, double tolerance, const std::string& what);

struct Outcome {
  bool free = false;  // ran without communication
  int gradients = 0;
  bool refused = false;
};
/// Runs `c` on operands placed at random over `mesh`, strictly and, if that is refused, with
/// communication allowed; compares results and gradients with plain ones. Throws on a difference,
/// and where cuts are refused that the op takes.
Outcome check_case(const Case& c, const DeviceMesh& mesh, Random& random);
/// The same with operand i in layouts[i].
Outcome check_placed(const Case& c, const DeviceMesh& mesh, const std::vector<Layout>& layouts,
                     Random& random);

}  // namespace tessera::test
