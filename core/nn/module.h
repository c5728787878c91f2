// A model is a tree of modules with named slots. A slot is a Tensor member of a module that the
// tree knows by address, so a wrapper may put another tensor into it (a shard, a cast) and the next
// forward computes with that one. Invariant: lists are in the order of registration, a module's own
// slots before those of its children; a tensor in several slots (tied) counts once, under its first
// name.
#pragma once
#include <concepts>
#include <functional>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/autograd/recompute.h"
#include "core/base/function_ref.h"
#include "core/dispatch/tracked_setting.h"
#include "core/nn/init.h"
#include "core/nn/scope.h"
#include "core/tensor/named_tensor.h"

namespace tessera::nn {

class Module;

/// Runs before a module's forward; may replace its inputs in place.
using PreHook = std::function<void(Module&, Inputs in)>;
/// Runs after a module's forward; may replace its result.
using PostHook = std::function<void(Module&, Inputs in, Tensor& out)>;

/// Runs when a module's forward ends by an exception instead, which goes on afterwards.
using UnwindHook = std::function<void(Module&)>;

struct Hooks;
/// Removes a hook. A handle may outlive its module, and the hook stays when the handle ends.
class HookHandle {
 public:
  HookHandle() = default;
  HookHandle(std::weak_ptr<Hooks> hooks, int number) : hooks_(std::move(hooks)), number_(number) {}
  void remove();
  /// False once its module is gone.
  bool attached() const { return !hooks_.expired(); }

 private:
  std::weak_ptr<Hooks> hooks_;
  int number_ = 0;
};

/// A place in the tree that holds a parameter or a buffer.
struct Slot {
  std::string name;  // path from where the search began: "h.0.ln_1.weight"
  Module* owner = nullptr;
  Tensor* tensor = nullptr;  // never undefined
  bool is_buffer = false;
  bool persistent = true;  // buffers only: part of state()
};

namespace detail {
template <class C, class R, class X>
std::bool_constant<!std::is_same_v<R(X), Tensor(Tensor)>> other_than_virtual(R (C::*)(X));
template <class C, class R, class X>
std::true_type other_than_virtual(R (C::*)(X) const);
/// Whether M declares a public forward of one tensor that does not override Module's: calls of the
/// module would never reach it.
template <class M>
constexpr bool hides_forward() {
  if constexpr (requires(M & m, Tensor x) {
                  m.forward(x);
                  other_than_virtual(&M::forward);
                })
    return decltype(other_than_virtual(&M::forward))::value;
  return false;
}
template <class M>
constexpr void check_forward() {
  static_assert(!hides_forward<M>(),
                "a module's forward does not override Module's, so calling the module would not "
                "reach it: declare it as Tensor forward(Tensor x) override");
}
}  // namespace detail

struct LoadOptions {
  bool strict = true;  // missing and unexpected names are errors; differing shapes always are
};
/// What load_state left out: names of the module that the state lacks (their values stay), and
/// names of the state that the module lacks. Both are empty where it was strict.
struct IncompatibleNames {
  std::vector<std::string> missing, unexpected;
};

class Module {
 public:
  Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  virtual ~Module();

  /// y = module(x), of a pointer (*module)(x), for modules with one input and one result: enters
  /// the module's scope, runs pre-hooks, forward(), which a module overrides, and post-hooks.
  /// Modules with other inputs declare an operator() of their own built on call().
  Tensor operator()(Tensor x);

  /// In every list below order is registration order and tied tensors appear once.
  std::vector<Tensor> parameters();
  std::vector<NamedTensor> named_parameters();
  /// Those that require grad: for an optimizer of a model with frozen parts.
  std::vector<NamedTensor> trainable_parameters();
  std::vector<NamedTensor> named_buffers();
  /// This module ("") and all below it; a module reached twice is listed once.
  std::vector<std::pair<std::string, Module*>> named_modules();
  /// Every slot with a tensor, tied ones under each of their names.
  std::vector<Slot> slots();
  /// The slot at `path`, which may be empty (a bias that is off). Throws UserError listing the
  /// module's names.
  Tensor& slot(std::string_view path);
  /// The module at `path`. Throws UserError.
  Module& submodule(std::string_view path);
  /// Puts `now` into every slot that holds `old`, so that ties survive. An optimizer of `old`
  /// refuses its next step. Throws UserError when no slot does.
  void replace(const Tensor& old, const Tensor& now);
  int64_t num_parameters();

  Module& train(bool on = true);
  Module& eval() { return train(false); }
  bool training() const;
  /// Casts float parameters and buffers. They become new tensors: call it before an optimizer or a
  /// wrapper sees them (UserError where ddp has).
  Module& to(DType dtype);
  /// Copies parameters and buffers to `device`. They become new tensors: call it where to(dtype)
  /// may be called.
  Module& to(Device device);
  Module& requires_grad_(bool on = true);
  void zero_grad();
  /// Draws all parameters anew from `seed` and their names: values depend on neither order, world
  /// size nor sharding.
  void init(uint64_t seed) { reset(InitKeys(seed)); }
  /// Calls `f` on this module and all below it.
  void apply(FunctionRef<void(Module&)> f);

  /// Parameters and persistent buffers, as they are in their slots.
  std::vector<NamedTensor> state();
  /// Copies values into the slots, cast to their dtypes. All is checked before anything is written:
  /// UserError lists every missing, unexpected and mismatched name at once. A tied tensor is found
  /// under any of its names.
  IncompatibleNames load_state(std::span<const NamedTensor> state, LoadOptions options = {});

  /// Keeps `attached`, an object of a wrapper of this module, until the module ends.
  void keep_alive(std::shared_ptr<void> attached) { attached_.push_back(std::move(attached)); }
  /// `outermost`: before the pre-hooks that are there, not after them.
  HookHandle add_pre_hook(PreHook hook, bool outermost = false);
  HookHandle add_post_hook(PostHook hook);
  HookHandle add_unwind_hook(UnwindHook hook);

  /// From now on backward computes this module's forward again, hooks included, instead of keeping
  /// what it computed, `options.keep` excepted; the module must live until then. For modules called
  /// with one tensor, or built on call_owning(): others throw UserError, and their caller writes
  /// recompute() around the call.
  void recompute(RecomputeOptions options = {});

  /// Path from the root of the tree this module was first registered in.
  const std::string& path() const { return path_; }
  /// "Linear"; the default takes the class's name.
  virtual std::string type_name() const;
  /// What stands in the brackets: "in=784, out=128".
  virtual std::string describe() const { return {}; }
  /// The tree, a line per module, as PyTorch prints it.
  std::string to_string() const;

  // How a module is built; called from constructors.
  /// A float `value` requires grad from now on (freeze it afterwards, by requires_grad_(false));
  /// an undefined one leaves the slot empty, as a bias that is off. Throws UserError for a name
  /// that is taken and for the result of an op that is differentiated.
  void register_parameter(std::string name, Tensor& slot, Tensor value);
  void register_buffer(std::string name, Tensor& slot, Tensor value, bool persistent = true);
  /// Makes `module` a child. A member that holds a module is no child by itself, for C++ has no
  /// list of a class's members: one with trainable parameters that is not registered throws
  /// UserError when it is called in the forward of another module, unless gradients are off there.
  template <class M>
  std::shared_ptr<M> register_module(std::string name, std::shared_ptr<M> module) {
    detail::check_forward<M>();
    adopt(std::move(name), module);
    return module;
  }
  /// Makes `member`, a module held by value in this one, a child: `nn::Linear fc{400, 120};` in the
  /// class, `register_module("fc", fc);` in its constructor. It must live as long as this module.
  template <std::derived_from<Module> M>
  void register_module(std::string name, M& member) {
    detail::check_forward<M>();
    adopt(std::move(name), std::shared_ptr<Module>(std::shared_ptr<Module>(), &member));
  }
  /// Several members at once: register_modules({{"fc1", fc1}, {"fc2", fc2}}).
  struct Member {
    template <std::derived_from<Module> M>
    Member(std::string name, M& module) : name(std::move(name)), module(module) {
      detail::check_forward<M>();
    }
    std::string name;
    Module& module;
  };
  void register_modules(std::initializer_list<Member> members) {
    for (const Member& m : members) register_module(m.name, m.module);
  }

  /// Draws the module's own parameters and those of its children, with keys named after them. A
  /// module overrides this where it has parameters of its own, or where its parts need another
  /// distribution (a GPT's residual projections). The default draws children only and throws
  /// UserError for a parameter of its own, which it names.
  virtual void reset(const InitKeys& keys);

 protected:
  /// What the module computes of one tensor. Programs call the module, since this runs no hooks and
  /// enters no scope; overrides are protected too, so that programs cannot call them.
  virtual Tensor forward(Tensor x);
  /// The last line of a constructor that made parameters: draws them, unless a scope says otherwise
  /// (SkipInit).
  void draw();
  /// Runs `body` as this module's forward. `in` is an array of the caller: pre-hooks may change it,
  /// and `body` reads it.
  Tensor call(Inputs in, FunctionRef<Tensor()> body);
  /// The same for bodies that can run again by themselves, for recompute(): `body` owns what it
  /// needs besides its inputs.
  Tensor call_owning(std::vector<Tensor> in, std::function<Tensor(Inputs)> body);
  void reset_children(const InitKeys& keys);

 private:
  struct Entry {
    std::string name;
    Tensor* slot;
    bool is_buffer, persistent;
  };
  Tensor call_once(Tensor x);
  Tensor call_once(Inputs in, FunctionRef<Tensor()> body);
  void check_registered();
  void adopt(std::string name, std::shared_ptr<Module> module);
  void check_name(const std::string& name, const char* who) const;
  void set_path(const std::string& path);
  void collect_slots(const std::string& prefix, std::vector<Slot>& out);
  void collect_modules(const std::string& prefix,
                       std::vector<std::pair<std::string, Module*>>& out);
  std::vector<NamedTensor> distinct(bool parameters, bool buffers, bool persistent_only);
  std::string no_such(std::string_view path);
  void print(std::string& out, const std::string& name, int depth) const;
  const std::shared_ptr<Hooks>& hooks_of_call() const;
  Hooks& hooks_to_change();
  void changed(const char* what);

  std::vector<Entry> entries_;
  // A member by value has no owner here (use_count() is 0); it ends before this list does.
  std::vector<std::pair<std::string, std::shared_ptr<Module>>> children_;
  const Module* parent_ = nullptr;  // identity only
  std::string path_;
  bool registered_ = false;  // as a child, of a module that may have ended
  friend class Substituted;
  int substituted_ = 0;           // functional_call gives it its parameters
  std::shared_ptr<Hooks> hooks_;  // null until a hook is added; a call reads hooks_of_call()
  std::vector<std::shared_ptr<void>> attached_;
  std::optional<RecomputeOptions> recompute_;
  TrackedSetting training_{1};
  TrackedChanges parts_;  // hooks, slots, children, recomputation
};

/// Module::to_string().
std::ostream& operator<<(std::ostream& out, const Module& module);

/// The blocks of a model: modules that are called by a number, the outermost of each.
std::vector<std::pair<std::string, Module*>> numbered_modules(Module& model);

/// Trainable tensor of `shape` in the context's default dtype, without values yet.
Tensor empty_parameter(const Shape& shape);

}  // namespace tessera::nn
