// auto step = compile(train_step): runs a training step as one graph with generated kernels and
// planned memory, in place of the function. The rest of the program stays as it was.
//
//   auto step = compile([&](const Tensor& ids, const Tensor& targets) {
//     Tensor loss = model->loss(ids, targets);
//     loss.backward();
//     opt->step();
//     opt->zero_grad();
//     return loss.detach();
//   });
//   for (...) Tensor loss = step(ids, targets);
//
// Arguments and results are trees (core/autograd/tree.h): tensors, numbers, text, and containers,
// tuples and structs of them. The first calls run the function and record it
// (record/step_recorder.h). Two such calls on different memory may give the same graph, which holds
// all that they did. From then on, calls with arguments of the same types run that graph alone.
// Where a call reads values, talks to other ranks itself or leaves new tensors behind, the function
// runs at every call, and the graphs between the points where it reads are run compiled: slower,
// but right. What changes from call to call must be an argument or the values of a tensor (a
// learning rate is one). Plain C++ variables that the function reads are taken to be constant,
// except for switches of the library: training(), set_sync, requires_grad_, hooks.
#pragma once
#include <any>
#include <memory>
#include <source_location>
#include <tuple>
#include <type_traits>

#include "compile/options.h"
#include "compile/record/call_key.h"
#include "core/autograd/tree.h"
#include "core/base/function_ref.h"

namespace tessera::compiler {

/// Counts what was done with the calls so far.
struct CompileReport {
  int64_t calls = 0, replays = 0;  // of them, without running the function
  int64_t recordings = 0, segments = 0;
  int device_graphs = 0;  // that the last replay launched: one for a whole step, if it can be
  int compiled = 0;      // distinct graphs that are run compiled; one that serves many sizes is one
  double compile_s = 0;  // for them: passes, code (or the cache), memory
  // For graphs that serve many sizes: how many sizes were planned, how often the C++ compiler ran
  // for them, and the part of compile_s that they took.
  int sizes = 0, size_compilations = 0;
  double sizes_ms = 0;
  std::string why_static;   // why the last two calls that differ in one size are two graphs
  std::string why_not;      // why the last call was not replayable; "" when it was
  std::string unoptimised;  // why the last graph that runs as recorded does so; "": there is none
};

/// The tensors of a call's result, and what is needed to put the result together again.
struct StepResults {
  Tensors tensors;
  CallKey key;    // everything else that it returned
  std::any like;  // the result without its tensors
};

/// The part of compile() that does not depend on the function's types.
class StepCompiler {
 public:
  /// `site`: where the function is compiled, for errors of other ranks' calls.
  explicit StepCompiler(CompileOptions options,
                        std::source_location site = std::source_location::current());
  ~StepCompiler();
  StepCompiler(StepCompiler&&) noexcept;

  /// Returns the results of `body`, by running it or its graph. `inputs`: all tensors that it is
  /// given; `key`: everything else that it is given.
  StepResults call(std::span<const Tensor> inputs, const CallKey& key,
                   FunctionRef<StepResults()> body);
  const CompileReport& report() const;
  /// See Compiled::graph_report().
  std::string graph_report() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {

/// The tensors of trees (core/autograd/tree.h); `key` takes everything else in them.
struct Parts {
  Tensors tensors = {};
  CallKey key = {};

  void tensor(const Tensor& t) { tensors.push_back(t), key.add(t.defined()); }
  void size(size_t n) { key.add(n); }
  template <class T>
  void value(const T& v) {
    if constexpr (std::is_convertible_v<T, std::string_view>)
      key.add(std::string_view(v));
    else
      key.add_number(v);
  }
};

}  // namespace detail

/// A compiled function. One object must not be called from several threads at a time.
template <class F>
class Compiled {
 public:
  Compiled(F f, CompileOptions options, std::source_location site = std::source_location::current())
      : f_(std::move(f)), compiler_(std::move(options), site) {}

  template <class... A>
  auto operator()(const A&... args) {
    using R = std::remove_cvref_t<std::invoke_result_t<F&, const A&...>>;
    detail::Parts in;
    (tree::visit<std::decay_t<A>>(args, in), ...);
    if constexpr (std::is_void_v<R>) {
      compiler_.call(in.tensors, in.key, [&] {
        f_(args...);
        return StepResults();
      });
    } else {
      StepResults out = compiler_.call(in.tensors, in.key, [&] {
        R result = f_(args...);
        detail::Parts parts;
        tree::visit(result, parts);
        const Tensors none(parts.tensors.size());
        return StepResults{.tensors = std::move(parts.tensors),
                           .key = std::move(parts.key),
                           .like = tree::unflatten(result, none)};
      });
      return tree::unflatten(std::any_cast<const R&>(out.like), out.tensors);
    }
  }
  const CompileReport& report() const { return compiler_.report(); }
  /// Describes a run of the graph that was replayed last: kernels, bytes, communication, memory. ""
  /// before the first replay.
  std::string graph_report() const { return compiler_.graph_report(); }

 private:
  F f_;
  StepCompiler compiler_;
};

}  // namespace tessera::compiler

namespace tessera {

/// Returns `f` compiled: it takes the same arguments and returns the same results. See the head of
/// this file. What ranks of a step with collectives decide together is called at `site`: as for
/// collectives, ranks that compile it in different branches share one line, or pass `site`.
template <class F>
compiler::Compiled<F> compile(F f, compiler::CompileOptions options = {},
                              std::source_location site = std::source_location::current()) {
  return {std::move(f), std::move(options), site};
}

}  // namespace tessera
