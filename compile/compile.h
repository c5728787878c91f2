// auto step = compile(train_step): the step as one graph, fused, planned and generated, run without
// the program that made it. One line to add; without it the program is unchanged.
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
// The first calls run the function, recorded (step_recorder.h). Once two calls on memory of their
// own were the same one graph, and it says all that they did, later calls with arguments of the
// same types run that graph alone. Where a call looks at values, talks to other ranks itself or
// leaves new tensors behind, the function runs at every call and the graphs between its looks are
// run compiled: slower, and right. What changes from call to call must be an argument or the values
// of a tensor (a learning rate is one); plain C++ variables that the function reads are taken to be
// constant, other than switches of the library: training(), set_sync, requires_grad_, hooks.
#pragma once
#include <any>
#include <memory>
#include <tuple>
#include <type_traits>

#include "compile/call_key.h"
#include "core/base/function_ref.h"
#include "core/tensor/named_tensor.h"

namespace tessera::compiler {

struct CompileOptions {
  std::string name = "step";            // in logs and reports
  std::vector<NamedTensor> names = {};  // of parameters and state, for readable graphs
  // Passes that are left out, by name and separated by commas; TESSERA_COMPILE_SKIP adds to them.
  std::string skip = {};
  // Calls that differ in one size are one graph, between sizes that were recorded, where their
  // graphs say so (family.h); else each size has a graph of its own. False: for functions that
  // treat some sizes between others in a way of their own.
  bool dynamic = true;
  // Bytes that a run may take beside parameters and other state; 0: no limit. To keep to it, values
  // of the forward pass are computed again in backward, the cheapest for their size first, and no
  // more than has to be. TESSERA_COMPILE_MEMORY (megabytes) where this is 0. A graph of many sizes
  // keeps no limit.
  size_t memory_limit = 0;
};

/// What became of the calls so far.
struct CompileReport {
  int64_t calls = 0, replays = 0;  // of them, without running the function
  int64_t recordings = 0, segments = 0;
  int compiled = 0;      // distinct graphs with an executor
  double compile_s = 0;  // of them: passes, code (or the cache), memory
  // Of graphs that serve many sizes: sizes that were planned, what that took, runs of the compiler.
  int sizes = 0, size_compilations = 0;
  double sizes_ms = 0;
  std::string why_static;   // the last two calls that differ in one size are two graphs because
  std::string why_not;      // the last call was not replayable because; "" when it was
  std::string unoptimised;  // the last graph that runs as recorded does so because; "": none does
};

/// What a call returned: its tensors, and what puts them together again.
struct StepResults {
  Tensors tensors;
  CallKey key;    // everything else that it returned
  std::any like;  // the result without its tensors
};

/// The part of compile() that knows no types.
class StepCompiler {
 public:
  explicit StepCompiler(CompileOptions options);
  ~StepCompiler();
  StepCompiler(StepCompiler&&) noexcept;

  /// The results of `body`, by running it or its graph. `inputs`: all tensors it is given; `key`:
  /// all else that it is given.
  StepResults call(std::span<const Tensor> inputs, const CallKey& key,
                   FunctionRef<StepResults()> body);
  const CompileReport& report() const;
  /// Of the graph that was replayed last; "" before.
  std::string graph_report() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {

/// A value as a list of tensors and back: Tensor, containers of them, tuples and pairs. `rebuild`
/// takes the tensors from the front of the list and everything else from `like`.
template <class T>
struct Flat {
  static_assert((std::is_arithmetic_v<T> || std::is_enum_v<T>)&&sizeof(T) <= sizeof(uint64_t),
                "compile: arguments and results are tensors, containers, tuples or pairs of "
                "tensors, or numbers; pass the parts of a struct one by one");
  static void tensors(const T&, Tensors&) {}
  static void key(const T& value, CallKey& key) { key.add_number(value); }
  static T rebuild(const T& like, std::span<const Tensor>&) { return like; }
};
template <>
struct Flat<Tensor> {
  static void tensors(const Tensor& t, Tensors& list) { list.push_back(t); }
  static void key(const Tensor& t, CallKey& key) { key.add(t.defined()); }
  static Tensor rebuild(const Tensor&, std::span<const Tensor>& from) {
    Tensor t = from[0];
    from = from.subspan(1);
    return t;
  }
};
template <class List>
struct FlatList {
  static void tensors(const List& list, Tensors& out) {
    for (auto& x : list) Flat<std::remove_cvref_t<decltype(x)>>::tensors(x, out);
  }
  static void key(const List& list, CallKey& key) {
    key.add(list.size());
    for (auto& x : list) Flat<std::remove_cvref_t<decltype(x)>>::key(x, key);
  }
  static List rebuild(const List& like, std::span<const Tensor>& from) {
    List list;
    for (auto& x : like) list.push_back(Flat<std::remove_cvref_t<decltype(x)>>::rebuild(x, from));
    return list;
  }
};
template <class T>
struct Flat<std::vector<T>> : FlatList<std::vector<T>> {};
template <class T, size_t n>
struct Flat<SmallVector<T, n>> : FlatList<SmallVector<T, n>> {};
template <class Tuple>
struct FlatTuple {
  static void tensors(const Tuple& tuple, Tensors& out) {
    std::apply([&](auto&... x) { (Flat<std::remove_cvref_t<decltype(x)>>::tensors(x, out), ...); },
               tuple);
  }
  static void key(const Tuple& tuple, CallKey& key) {
    std::apply([&](auto&... x) { (Flat<std::remove_cvref_t<decltype(x)>>::key(x, key), ...); },
               tuple);
  }
  static Tuple rebuild(const Tuple& like, std::span<const Tensor>& from) {
    return std::apply(
        [&](auto&... x) {  // braces: from left to right
          return Tuple{Flat<std::remove_cvref_t<decltype(x)>>::rebuild(x, from)...};
        },
        like);
  }
};
template <class... T>
struct Flat<std::tuple<T...>> : FlatTuple<std::tuple<T...>> {};
template <class A, class B>
struct Flat<std::pair<A, B>> : FlatTuple<std::pair<A, B>> {};

}  // namespace detail

/// A compiled function. Calls of one object come from one thread at a time.
template <class F>
class Compiled {
 public:
  Compiled(F f, CompileOptions options) : f_(std::move(f)), compiler_(std::move(options)) {}

  template <class... A>
  auto operator()(const A&... args) {
    using R = std::remove_cvref_t<std::invoke_result_t<F&, const A&...>>;
    Tensors inputs;
    CallKey key;
    (detail::Flat<A>::tensors(args, inputs), ...);
    (detail::Flat<A>::key(args, key), ...);
    if constexpr (std::is_void_v<R>) {
      compiler_.call(inputs, key, [&] {
        f_(args...);
        return StepResults();
      });
    } else {
      StepResults out = compiler_.call(inputs, key, [&] {
        R result = f_(args...);
        StepResults r;
        detail::Flat<R>::tensors(result, r.tensors);
        detail::Flat<R>::key(result, r.key);
        Tensors none;
        none.resize(r.tensors.size());
        std::span<const Tensor> rest(none.data(), none.size());
        r.like = detail::Flat<R>::rebuild(result, rest);
        return r;
      });
      std::span<const Tensor> rest(out.tensors.data(), out.tensors.size());
      return detail::Flat<R>::rebuild(std::any_cast<const R&>(out.like), rest);
    }
  }
  const CompileReport& report() const { return compiler_.report(); }
  /// What the graph that was replayed last does in a run: kernels, bytes, communication, memory.
  std::string graph_report() const { return compiler_.graph_report(); }

 private:
  F f_;
  StepCompiler compiler_;
};

}  // namespace tessera::compiler

namespace tessera {

/// `f` compiled: called with what it takes, returns what it returns. See the head of this file.
template <class F>
compiler::Compiled<F> compile(F f, compiler::CompileOptions options = {}) {
  return {std::move(f), std::move(options)};
}

}  // namespace tessera
