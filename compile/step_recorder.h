// Recording without running. While a StepRecorder lives, every op of its thread is written down and
// its results are promises: tensors whose memory comes when somebody waits for it. Whoever looks at
// one on the host (item, data, a verb of a group, the end of the recording) makes the ops so far
// run as one graph, a segment, and the next op begins another. So a program computes what it would
// compute eagerly, wherever it looks. Invariant: memory that a recorded op reads or writes is
// neither seen nor changed by others before that op ran, because its storage is pending until then.
#pragma once
#include <functional>

#include "compile/trace.h"

namespace tessera::compiler {

/// Runs `graph` on the inputs of the recording and the implicit inputs that the graph holds.
using RunSegment = std::function<Tensors(Graph graph, std::span<const Tensor> inputs)>;

/// A handle that outlives the recording and was touched by it.
struct TouchedSlot {
  Ref<const RefCounted> owner;
  const Tensor* seen = nullptr;
  Tensor* changed = nullptr;  // the same place; null when it was only read
  Tensor before = {};
  Tensor after = {};    // once the recording is finished
  bool depends = true;  // what was recorded depends on `before`; else it was dropped unread
};

class StepRecorder final : public TraceBackend {
 public:
  /// Ops of this thread are recorded from now on. Throws UserError where another backend runs.
  StepRecorder(const TraceOptions& options, RunSegment run);
  /// Runs what is still to run, unless that failed already.
  ~StepRecorder() override;

  /// Runs the rest and ends the recording.
  void finish();

  // What a recording was, once it is finished:
  /// Why the program cannot be left out when its graph runs again; "" when it can as far as the
  /// recording saw.
  const std::string& break_reason() const { return break_; }
  int segments() const { return segments_; }
  const std::vector<TouchedSlot>& slots() const { return slots_; }
  const std::vector<std::pair<const bool*, bool>>& flags() const { return flags_; }
  /// The last segment, and the memory that its outputs gave to what others can still see.
  const Graph& last_graph() const { return last_; }
  const std::vector<Ref<Storage>>& provided() const { return provided_; }

  // Backend:
  Tensors run(const PrimRef& prim, Inputs in) override;
  void leaves_ops(std::string_view what) override;
  void value_read(std::string_view where) override;
  void slot_read(const RefCounted& owner, const Tensor& slot) override;
  void slot_changes(const RefCounted& owner, Tensor& slot, const Tensor& now) override;
  void depends_on(const bool& flag) override;

 private:
  class Promise;
  struct Met {
    Ref<Storage> storage;
    Ref<Event> before;  // what the storage was waiting for
  };

  Tensors execute(const PrimRef& prim, Inputs in) override;
  void write(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override;
  bool meets(const Tensor& t) override;
  void looked_at(const std::string& why);
  std::vector<Tensor> visible();
  Tensors run_segment(Graph graph, const std::vector<Met>& met);
  void flush();

  TraceOptions options_;
  RunSegment run_;
  Ref<Promise> promise_;
  std::vector<Met> met_;  // existing memory that the segment reads or writes
  std::vector<TouchedSlot> slots_;
  std::vector<std::pair<const bool*, bool>> flags_;
  std::vector<Ref<Storage>> provided_;
  Graph last_;
  std::string break_;
  int segments_ = 0;
  std::optional<Scoped<Backend*>> recording_;
};

}  // namespace tessera::compiler
