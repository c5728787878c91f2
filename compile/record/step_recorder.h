// Records ops without running them. While a StepRecorder lives, every op of its thread is written
// down, and its results are promises: tensors that are computed when they are needed. When the
// program reads one on the host (item, data, a verb of a group, the end of the recording), the ops
// so far run as one graph, a segment, and the next op begins another. So a program computes what it
// would compute eagerly, wherever it reads. Invariant: memory that a recorded op reads or writes is
// neither read nor changed by others before that op ran, because its storage is pending until then.
#pragma once
#include <functional>
#include <unordered_set>

#include "compile/record/trace.h"

namespace tessera::compiler {

/// Runs `graph` on the inputs of the recording and the implicit inputs that the graph holds.
using RunSegment = std::function<Tensors(Graph graph, std::span<const Tensor> inputs)>;

/// A handle that outlives the recording and was read or changed by it.
struct TouchedSlot {
  Ref<const RefCounted> owner;
  const Tensor* seen = nullptr;
  Tensor* changed = nullptr;  // the same place; null when it was only read
  Tensor before = {};
  Tensor after = {};    // known once the recording is finished
  bool depends = true;  // what was recorded depends on `before`; else it was dropped unread
};

/// A switch that outlives the recording and was read or changed by it (tracked_setting.h).
struct TouchedSetting {
  Ref<const RefCounted> owner;
  const int64_t* seen = nullptr;
  int64_t* changed = nullptr;  // the same place; null when it was only read
  int64_t before = 0;
  int64_t after = 0;    // known once the recording is finished
  bool depends = true;  // it was read before it was set
};

/// What ops read from a handle besides its memory: whether it requires a gradient, and where that
/// goes.
struct HandleState {
  const void* grad = nullptr;  // null: it does not require one
  const void* sink = nullptr;
  bool replaced = false;
  bool operator==(const HandleState&) const = default;
};
HandleState state_of(const Tensor& handle);

/// A handle that existed before the recording, still exists, and was an operand of an op.
struct TouchedHandle {
  Tensor handle;
  HandleState before = {};
};

class StepRecorder final : public TraceBackend {
 public:
  /// Records the ops of this thread from now on. `arguments`: the handles that the program is
  /// given, which are others at each call. Throws UserError where another backend runs.
  StepRecorder(const TraceOptions& options, RunSegment run, std::span<const Tensor> arguments = {});
  /// Runs what is left to run, unless that failed already.
  ~StepRecorder() override;

  /// Runs the rest and ends the recording.
  void finish();

  // What is known once the recording is finished:
  /// Why the program has to run whenever its graph does; "" when the recording saw no reason.
  const std::string& break_reason() const { return break_; }
  int segments() const { return segments_; }
  const std::vector<TouchedSlot>& slots() const { return slots_; }
  const std::vector<TouchedSetting>& settings() const { return settings_; }
  const std::vector<TouchedHandle>& handles() const { return handles_; }
  /// The last segment, and the memory of those of its outputs that are visible outside.
  const Graph& last_graph() const { return last_; }
  const std::vector<Ref<Storage>>& provided() const { return provided_; }

  // Backend:
  Tensors run(const PrimRef& prim, Inputs in) override;
  // Observer:
  void notice(const HostEvent& event) override;

 private:
  class Promise;
  struct Met {
    Ref<Storage> storage;
    Ref<Event> before;  // what the storage was waiting for
  };

  Tensors execute(const PrimRef& prim, Inputs in) override;
  void write(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override;
  bool meets(const Tensor& t) override;
  bool own(const Ref<Event>& ready) const;
  void leave(const std::vector<Met>& met);
  void on(const events::LeavesOps& event);
  void on(const events::ValueRead& event);
  void on(const events::SlotRead& event);
  void on(const events::SlotChange& event);
  void on(const events::SettingRead& event);
  void on(const events::SettingChange& event);
  void on(const events::HandlesRead& event);
  void on(const events::CustomFunctionRuns& event);
  void values_read(std::string what);
  void looked_at(const std::string& why);
  TouchedSetting& setting(const RefCounted& owner, const int64_t& value, bool read);
  void forget_handles();
  std::vector<Tensor> visible();
  Tensors run_segment(Graph graph, const std::vector<Met>& met);
  void flush();

  TraceOptions options_;
  RunSegment run_;
  Ref<Promise> promise_;  // the event of results and of memory that the segment writes
  Ref<Promise> reading_;  // the event of existing memory that it has only read so far
  std::vector<Met> met_;  // existing memory that the segment reads or writes
  std::vector<TouchedSlot> slots_;
  std::vector<TouchedSetting> settings_;
  std::unordered_map<const int64_t*, size_t> setting_of_;  // by place, into settings_
  std::vector<TouchedHandle> handles_;
  std::unordered_set<const TensorImpl*> known_handles_;  // those and the arguments
  size_t forget_handles_at_ = 256;
  std::vector<Ref<Storage>> provided_;
  Graph last_;
  std::string break_;
  std::vector<std::string> functions_;  // custom ones that run, the innermost last
  int segments_ = 0;
  std::optional<BackendScope> recording_;
};

}  // namespace tessera::compiler
