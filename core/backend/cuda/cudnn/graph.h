// Graphs of cuDNN's operations, and plans that compute them. A graph is built operation by
// operation, by the C backend API alone; the library then suggests engines for it, and those that
// compile make plans. Invariant: nothing here needs a card, where a device description
// stands for one, so that graphs are compiled on machines without. A graph whose building fails
// stays failed, and says why when it is compiled.
#pragma once
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/backend/cuda/cudnn.h"

namespace tessera::cuda::dnn {

/// A descriptor, destroyed with this.
class Object {
 public:
  Object(const CudnnFunctions& f, int type);
  ~Object();
  Object(Object&& o) noexcept : f_(o.f_), at_(std::exchange(o.at_, nullptr)) {}
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  Descriptor at() const { return at_; }

 private:
  const CudnnFunctions& f_;
  Descriptor at_ = nullptr;  // null where the library makes none
};

/// What a graph is compiled for: a card by a handle of it, or a described device.
struct Target {
  Handle handle = nullptr;
  Descriptor properties = nullptr;
};
/// A device by cuDNN's description of it, a text of JSON; says in `why` what is wrong with that.
std::optional<Object> described_device(const CudnnFunctions& f, std::string_view json,
                                       std::string& why);

/// Which engines may compute.
struct Demands {
  bool deterministic = false;   // the same bits each time
  bool full_precision = false;  // f32 products are not rounded to TF32
};

/// An engine and its settings, by which it is found again without asking for suggestions.
struct Engine {
  int64_t index = -1;
  std::vector<std::pair<int64_t, int64_t>> knobs;  // type, value
};
std::string text_of(const Engine& engine);
std::optional<Engine> engine_of(std::string_view text);

/// A value of the graph and where it is in memory.
struct Binding {
  int64_t value;
  const void* at;
};

class ExecutionPlan {
 public:
  size_t workspace_bytes() const { return workspace_bytes_; }
  const Engine& engine() const { return engine_; }
  /// The plan and the code that the library compiled for it, as a text of JSON of some 100 KB, from
  /// which Graph::reload makes the plan again without compiling. "" where the engine compiles
  /// nothing, so that the plan is made as fast from the graph, or the library has no such text.
  std::string text() const;
  /// Enqueues the graph on the stream of `handle`. Says in `why` what failed.
  Status execute(Handle handle, std::span<const Binding> bindings, void* workspace,
                 std::string& why) const;

 private:
  friend class Graph;
  ExecutionPlan(const CudnnFunctions& f, std::shared_ptr<std::vector<Object>> objects)
      : f_(f), objects_(std::move(objects)), plan_(f, kPlan) {}
  const CudnnFunctions& f_;
  std::shared_ptr<std::vector<Object>> objects_;  // of the graph
  Object plan_;
  std::deque<std::pair<int64_t, float>> scalars_;
  Engine engine_;
  size_t workspace_bytes_ = 0;
  bool compiled_ = false;  // its code, when the plan was made
};

using Plans = std::vector<std::unique_ptr<ExecutionPlan>>;

using Extents = std::vector<int64_t>;
Extents dense_strides(const Extents& extents);
/// The strides of a dense [N, C, places..] whose channels are neighbours.
Extents last_strides(const Extents& extents);

enum class ConvKind : int32_t { kForward, kGradInput, kGradWeight };

class Graph {
 public:
  using Value = int64_t;  // what a binding calls it
  static constexpr Value kNone = 0;

  explicit Graph(const CudnnFunctions& f) : f_(f) {}

  /// A value that bindings give memory; `alignment` in bytes is what its address has at least.
  Value tensor(const Extents& extents, const Extents& strides, int type, int64_t alignment = 16);
  /// A value that exists within the graph alone.
  Value inner(const Extents& extents, int type) {
    return inner(extents, dense_strides(extents), type);
  }
  Value inner(const Extents& extents, const Extents& strides, int type);
  /// A number beside values of so many dims, kept by the graph.
  Value scalar(float value, size_t dims = 4);

  // y is the result, of operands that are broadcast to it. All compute in f32.
  void pointwise(int mode, Value x, Value b, Value y) { pointwise(mode, x, b, kNone, y, -1); }
  void select(Value where, Value x, Value other, Value y) {
    pointwise(kSelect, x, other, where, y, -1);
  }
  /// y: positions along dim `axis`, as many as x has.
  void index(Value x, int64_t axis, Value y) { pointwise(kIndex, x, kNone, kNone, y, axis); }
  void matmul(Value a, Value b, Value c);
  /// Sums or maxima along the dims in which y has one place.
  void reduce(int kind, Value x, Value y);
  /// The same elements in the order that the extents and strides of y say.
  void reshape(Value x, Value y);
  struct Window {
    Extents begin, end, stride, dilation;
  };
  /// The sums of x [N, C, ..] and of its squares over all but channels.
  void statistics(Value x, Value sum, Value squares);
  /// The operand that `kind` names is the result.
  void convolution(ConvKind kind, Value x, Value w, Value y, const Window& window);

  /// The library takes no such graph: `why` is what compiling says.
  void refuse(std::string why) { why_ = std::move(why); }

  /// What the graph is, in full.
  const std::string& text() const { return text_; }
  /// Compiles the graph: by `kept` where that still is an engine of it, else by up to `most`
  /// suggestions that meet the demands and compile, the best first. None where there are none;
  /// `why` says why.
  Plans compile(const Target& target, const Demands& demands, const Engine* kept, size_t most,
                std::string& why);
  /// The plan of this graph by `engine` that had `text`, for the same library, kind of device and
  /// driver. Null where the library does not take it; `why` says why. The library does not compare
  /// `text` with the graph, nor does it notice all damage: both are the caller's to prove.
  std::unique_ptr<ExecutionPlan> reload(const Target& target, const Engine& engine,
                                        std::string_view text, std::string& why) const;

 private:
  void pointwise(int mode, Value x, Value b, Value t, Value y, int64_t axis);
  Value add_tensor(const Extents& extents, const Extents& strides, int type, int64_t alignment,
                   bool inner, bool by_value);
  Descriptor make(int type);
  bool check(Status status, const char* what);
  void set(Descriptor d, int attribute, int type, int64_t count, const void* values,
           const char* what);
  void set(Descriptor d, int attribute, int64_t value, const char* what);
  void set(Descriptor d, int attribute, Descriptor value, const char* what);
  void set_value(Descriptor d, int attribute, Value value, const char* what);
  void set_type(Descriptor d, int attribute, const char* what);
  void finish(Descriptor d, const char* what);
  void finish_op(Descriptor d, const char* what);

  std::vector<Descriptor> suggestions(const Target& target, Descriptor graph, int mode);
  bool meets(Descriptor config, const Demands& demands, Engine& engine);
  bool compiles_code(Descriptor config);
  Descriptor config_of(const Target& target, Descriptor graph, const Engine& engine);
  std::unique_ptr<ExecutionPlan> plan(const Target& target, Descriptor config,
                                      const Engine& engine);

  const CudnnFunctions& f_;
  std::shared_ptr<std::vector<Object>> objects_ = std::make_shared<std::vector<Object>>();
  std::vector<Descriptor> tensors_, ops_;  // by value - 1; in order
  std::deque<std::pair<Value, float>> scalars_;
  std::string text_, why_;
};

}  // namespace tessera::cuda::dnn
