// Modules made of modules. Children are called "0", "1", ... in order.
#pragma once
#include "core/nn/module.h"

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
  Tensor compute(Tensor x) override {
    for (auto& m : modules_) x = m->forward(std::move(x));
    return x;
  }

 private:
  size_t first_ = 0;
  std::vector<std::shared_ptr<Module>> modules_;
};

using SequentialPtr = std::shared_ptr<Sequential>;

/// nn::sequential(nn::linear(784, 128), nn::gelu(), nn::linear(128, 10))
template <class... M>
SequentialPtr sequential(std::shared_ptr<M>... modules) {
  auto s = std::make_shared<Sequential>();
  (s->push_back(std::move(modules)), ...);
  return s;
}

/// A list whose owner calls its modules itself: for (Block& b : *blocks) x = b(x). Names count from
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

template <class M = Module>
std::shared_ptr<ModuleList<M>> module_list(size_t first = 0) {
  return std::make_shared<ModuleList<M>>(first);
}

}  // namespace tessera::nn
