// Modules made of modules. Children are called "0", "1", ... in order.
#pragma once
#include "core/nn/layers.h"

namespace tessera::nn {

/// Feeds each module the result of the one before. Names count from `first`, for a part of a longer
/// list.
class Sequential final : public Module {
 public:
  explicit Sequential(size_t first = 0) : first_(first) {}
  explicit Sequential(std::vector<std::shared_ptr<Module>> modules) {
    for (auto& m : modules) push_back(std::move(m));
  }
  void push_back(std::shared_ptr<Module> module) {
    modules_.push_back(
        register_module(std::to_string(first_ + modules_.size()), std::move(module)));
  }
  /// Modules begin .. end - 1, shared and called as here.
  std::shared_ptr<Sequential> part(size_t begin, size_t end) const {
    auto list = std::make_shared<Sequential>(first_ + begin);
    for (size_t i = begin; i < end; ++i) list->push_back(modules_.at(i));
    return list;
  }
  size_t size() const { return modules_.size(); }
  const std::shared_ptr<Module>& operator[](size_t i) const { return modules_.at(i); }

 protected:
  Tensor forward(Tensor x) override {
    for (auto& m : modules_) x = (*m)(std::move(x));
    return x;
  }

 private:
  size_t first_ = 0;
  std::vector<std::shared_ptr<Module>> modules_;
};

using SequentialPtr = std::shared_ptr<Sequential>;

namespace detail {
template <class M>
std::shared_ptr<M> shared_module(std::shared_ptr<M> module) {
  check_forward<M>();
  return module;
}
template <class F>
auto shared_module(F f) {
  return activation("Function", std::move(f));
}
}  // namespace detail

/// nn::sequential(nn::linear(784, 128), nn::gelu(), nn::linear(128, 10)). Functions of a tensor may
/// be among the modules: [](Tensor x) { return x * 2; }.
template <class... M>
SequentialPtr sequential(M... modules) {
  static_assert((!std::derived_from<M, Module> && ...),
                "a Sequential shares its modules: nn::linear(2, 3) instead of nn::Linear(2, 3)");
  auto s = std::make_shared<Sequential>();
  (s->push_back(detail::shared_module(std::move(modules))), ...);
  return s;
}

/// A list of modules, which its owner calls: for (Block& b : *blocks) x = b(x). Names count from
/// `first`, for a part of a longer list.
template <class M = Module>
class ModuleList final : public Module {
 public:
  explicit ModuleList(size_t first = 0) : first_(first) {}
  void push_back(std::shared_ptr<M> module) {
    modules_.push_back(
        register_module(std::to_string(first_ + modules_.size()), std::move(module)));
  }
  size_t size() const { return modules_.size(); }
  M& operator[](size_t i) const { return *modules_.at(i); }

  class Iterator {
   public:
    explicit Iterator(const std::shared_ptr<M>* at) : at_(at) {}
    M& operator*() const { return **at_; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    bool operator==(const Iterator&) const = default;

   private:
    const std::shared_ptr<M>* at_;
  };
  Iterator begin() const { return Iterator(modules_.data()); }
  Iterator end() const { return Iterator(modules_.data() + modules_.size()); }

 private:
  size_t first_;
  std::vector<std::shared_ptr<M>> modules_;
};

/// Modules that their owner finds by name: (*heads)["digits"](x). Order is that of insertion.
template <class M = Module>
class ModuleDict final : public Module {
 public:
  /// Throws UserError for a name that is taken.
  void insert(std::string name, std::shared_ptr<M> module) {
    modules_.emplace_back(name, register_module(name, std::move(module)));
  }
  size_t size() const { return modules_.size(); }
  bool contains(std::string_view name) const { return find(name) != modules_.end(); }
  /// Throws UserError for a name that is not there.
  M& operator[](std::string_view name) const {
    auto at = find(name);
    TESSERA_CHECK(at != modules_.end(), "module_dict: no \"{}\" among {} modules", name, size());
    return *at->second;
  }
  auto begin() const { return modules_.begin(); }
  auto end() const { return modules_.end(); }

 private:
  auto find(std::string_view name) const {
    auto at = modules_.begin();
    while (at != modules_.end() && at->first != name) ++at;
    return at;
  }
  std::vector<std::pair<std::string, std::shared_ptr<M>>> modules_;
};

template <class M = Module>
std::shared_ptr<ModuleDict<M>> module_dict() {
  return std::make_shared<ModuleDict<M>>();
}

template <class M = Module>
std::shared_ptr<ModuleList<M>> module_list(size_t first = 0) {
  return std::make_shared<ModuleList<M>>(first);
}

}  // namespace tessera::nn
