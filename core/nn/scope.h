// A scope names the place in the model where the calling thread is: "h.0.attn". Entering costs a
// few stores, and no text is made until one is asked for (a name for a graph node, a report of a
// NaN). Invariant: frames live on the C++ stack and are left in reverse order.
// Internal: not part of the public interface.
#pragma once
#include <string>
#include <string_view>

#include "core/base/profile.h"
#include "core/tensor/memory_label.h"

namespace tessera::nn {

class Scope {
 public:
  /// Part of the step below the current scope: Scope loss("loss"). `name` must outlive the scope.
  explicit Scope(std::string_view name) : Scope(name, false) {}
  /// A module at `path` from the root of its tree, wherever it is called from.
  static Scope module(std::string_view path) { return Scope(path, true); }
  ~Scope() { innermost() = outer_; }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  /// True while a module's forward runs on this thread.
  static bool in_module() {
    for (const Scope* s = innermost(); s; s = s->outer_)
      if (s->is_module_) return true;
    return false;
  }
  /// "" outside of any scope.
  static std::string current() {
    std::string path;
    for (const Scope* s = innermost(); s; s = s->outer_) {
      if (!s->name_.empty())
        path = path.empty() ? std::string(s->name_) : std::string(s->name_) + "." + path;
      if (s->is_module_) break;
    }
    return path;
  }

 private:
  Scope(std::string_view name, bool is_module)
      : outer_(innermost()),
        name_(name),
        is_module_(is_module),
        label_(MemoryUse::kActivations, name),
        span_(name.empty() ? "model" : name, "module") {
    innermost() = this;
  }
  static const Scope*& innermost() {
    thread_local const Scope* scope = nullptr;
    return scope;
  }

  const Scope* outer_;
  std::string_view name_;
  bool is_module_;
  MemoryLabel label_;  // of what a device allocates meanwhile
  ProfileSpan span_;
};

}  // namespace tessera::nn
