// Calls that differ in one size: two recorded calls are one, with a graph that is linear in that
// size. Invariant: a DynamicCall covers the sizes between the least and the largest that were
// recorded and found to be on its lines (a program may treat what is longer than its window in
// another way; CompileOptions::beyond_recorded says that it does not). It answers when two sizes
// leave no doubt (in proportion, or a constant beside the size) or a
// third was what they had foretold, and when shape inference of the whole graph takes the size.
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
  /// Of two calls of one kind; nothing where they are none, and *why then says what differs: "" if
  /// they differ in more than one size, or in a size below 2, which ops treat in their own ways.
  static std::unique_ptr<DynamicCall> unify(const RecordedCall& a, const RecordedCall& b,
                                            std::string* why);
  /// The size that `key` has where the calls of this one differ; nothing where it is of
  /// another.
  std::optional<int64_t> size_of(const CallKey& key) const;
  /// The call at `size`, known by `key`. Throws ShapeError where graph or results do not take it.
  RecordedCall at(int64_t size, const CallKey& key) const;
  Graph graph_at(int64_t size) const { return graph_.at(size); }
  const CachedCall& entry() const { return a_.entry; }
  const CachedCall& other_entry() const { return b_.entry; }
  /// True when `size` lies between sizes that were recorded.
  bool covers(int64_t size) const { return low_ <= size && size <= high_; }
  /// A recording at `size` was what had been foretold.
  void confirm(int64_t size) {
    confirmed = true, low_ = std::min(low_, size), high_ = std::max(high_, size);
  }
  /// What `call`, recorded at another size, shows: "" when it was foretold, else what differs.
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
  int64_t low_, high_;  // sizes between which it answers
};

}  // namespace tessera::compiler
