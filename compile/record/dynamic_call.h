// Calls that differ in one size share a graph: two recorded calls become one DynamicCall whose
// graph is linear in that size. Invariant: it covers the sizes between the least and the largest
// that were recorded and confirmed (a program may treat an input longer than its window in another
// way; CompileOptions::beyond_recorded says that it does not). It serves a call only if two sizes
// determine every number (each is in proportion to the size, or the size plus a constant) or a
// third recording was as predicted, and if shape inference of the whole graph accepts the size.
#pragma once
#include <algorithm>
#include <memory>

#include "compile/record/dynamic_graph.h"
#include "compile/record/guards.h"

namespace tessera::compiler {

/// A recorded call and its graph.
struct RecordedCall {
  CachedCall entry;
  std::shared_ptr<const Graph> graph;
};

class DynamicCall {
 public:
  /// Makes one call of two whose keys differ only in extents; null where that is impossible. *why
  /// then says what differs; it is "" if they differ in more than one size, or in a size below 2,
  /// which ops treat specially.
  static std::unique_ptr<DynamicCall> unify(const RecordedCall& a, const RecordedCall& b,
                                            std::string* why);
  /// Returns the size in `key` that varies in this call; nothing if `key` is of another kind.
  std::optional<int64_t> size_of(const CallKey& key) const;
  /// Returns the call at `size`, with `key` as its key. Throws ShapeError where the graph or the
  /// results do not accept the size.
  RecordedCall at(int64_t size, const CallKey& key) const;
  Graph graph_at(int64_t size) const { return graph_.at(size); }
  const CachedCall& entry() const { return a_.entry; }
  const CachedCall& other_entry() const { return b_.entry; }
  /// True when `size` lies between sizes that were recorded.
  bool covers(int64_t size) const { return low_ <= size && size <= high_; }
  /// Notes that a recording at `size` was as predicted.
  void confirm(int64_t size) {
    confirmed = true, low_ = std::min(low_, size), high_ = std::max(high_, size);
  }
  /// Compares `call`, recorded at another size, with the prediction: "" when they agree, else what
  /// differs.
  std::string compare(int64_t size, const RecordedCall& call) const;

  bool confirmed = false;
  int64_t size_a() const { return line_.size_a; }
  int64_t size_b() const { return line_.size_b; }

 private:
  DynamicCall(const RecordedCall& a, const RecordedCall& b, DynamicGraph graph, Line line)
      : a_(a),
        b_(b),
        graph_(std::move(graph)),
        line_(line),
        low_(std::min(line.size_a, line.size_b)),
        high_(std::max(line.size_a, line.size_b)) {}
  Source source_at(const Source& a, const Source& b, int64_t size) const;

  RecordedCall a_, b_;
  DynamicGraph graph_;
  Line line_;
  int64_t low_, high_;  // the least and the largest size that it covers
};

}  // namespace tessera::compiler
