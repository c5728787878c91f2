// Records a step while it runs. While a Trace lives, every op of its thread runs through the eager
// backend as usual and is appended to a graph. Invariant: a tensor is identified by the memory it
// sees (storage, version, layout), so handles, detached copies and views made twice are one value,
// and a write gives the written memory new values.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "compile/ir/graph.h"
#include "core/dispatch/observer.h"
#include "core/dispatch/target.h"
#include "core/tensor/named_tensor.h"

namespace tessera::compiler {

struct TraceOptions {
  std::vector<Tensor> inputs = {};      // tensors that are replaced by others in later runs
  std::vector<NamedTensor> names = {};  // of implicit inputs, for printing
};

/// The backend of a trace: runs each op eagerly and writes it down. It keeps a reference to the
/// memory of everything that can still be read, so no kernel takes an operand over and a recorded
/// value keeps its values. Throws UserError when memory that it knows was written by something
/// other than an op.
class TraceBackend : public Backend, public Observer {
 public:
  /// `who` begins the text of each error.
  explicit TraceBackend(const TraceOptions& options, const char* who = "trace");

  Tensors run(const PrimRef& prim, Inputs in) override;
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override;
  /// Throws UserError where the program does something that is not an op: a replay would not repeat
  /// it, and what it wrote would stay as it is now.
  void notice(const HostEvent& event) override;
  /// A dispatch target with which the ops of the calling thread are recorded.
  DispatchTarget target() { return {.backend = this, .observer = this, .records = true}; }
  /// Makes `tensors` the outputs and returns the graph.
  Graph finish(std::span<const Tensor> tensors);

 protected:
  struct Layout {
    Meta meta;
    int64_t offset;
    ValueId id;
  };
  /// What is known of one storage at its present version.
  struct Memory {
    Ref<Storage> storage;
    uint32_t version = 0;
    SmallVector<Layout, 2> layouts;  // the first one represents the others
    int inputs = 0;                  // explicit inputs that live in it
    Tensor input = {};               // the first of them
  };

  /// Runs an op that is being recorded. StepRecorder overrides it to defer the op.
  virtual Tensors execute(const PrimRef& prim, Inputs in);
  virtual void write(std::span<const Tensor> dst, const PrimRef& prim, Inputs in);
  /// Called when an op reads or writes the memory of `t`, which existed before the trace. Returns
  /// true if no deferred op involves that memory, so that its values now are those that the op will
  /// find.
  virtual bool meets(const Tensor& /*t*/) { return false; }
  /// Begins another graph on inputs with the layouts of `options`.
  void begin_graph(const TraceOptions& options);

  ValueId read(const Tensor& t);
  ValueId reach(Memory& memory, const Tensor& t);
  ValueId adopt(const Tensor& t);
  ValueId shape_of(const Meta& meta);
  ValueId add_value(const Tensor& t, ValueId buffer);
  Memory& remember(const Tensor& t, ValueId id);
  void check_unchanged(const Memory& memory, const Tensor& t) const;
  void overwritten(std::span<const Tensor> dst, const ValueIds& out);
  Node begin(const PrimRef& prim, Inputs in);
  int32_t scope_here();
  void forget_unreachable();

  const char* const who_;
  Graph graph_;
  std::unordered_map<const Storage*, Memory> memory_;
  std::unordered_map<const Storage*, std::string> names_;
  std::unordered_map<std::string, int32_t> scopes_;
  std::map<uint64_t, int32_t> scope_of_node_;  // by autograd node, see scope_here
  size_t forget_at_ = 256;                     // storages
};

/// auto trace = Trace({.inputs = {x}}); Tensor y = f(x); Graph g = trace.finish({y});
/// Traces of one thread do not nest (UserError).
class Trace {
 public:
  explicit Trace(TraceOptions options = {});
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// Ends the recording and returns the graph, verified. Its outputs are `tensors`, in this order.
  Graph finish(std::span<const Tensor> tensors = {});
  Graph finish(std::initializer_list<Tensor> tensors) {
    return finish(std::span(tensors.begin(), tensors.size()));
  }

 private:
  TraceOptions options_;  // keeps the named memory alive
  TraceBackend backend_;
  std::optional<BackendScope> recording_;
};

}  // namespace tessera::compiler
