// Initial values. Each parameter is drawn by the counter-based generator under a key made of a seed
// and the parameter's name, at its global element index: the values depend on neither the order of
// construction, nor world size, nor sharding.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/tensor/tensor.h"

namespace tessera::nn {

/// Deals the keys of a subtree: key("weight") of child("0") of InitKeys(7) belongs to the name
/// "0.weight" under seed 7.
class InitKeys {
 public:
  explicit InitKeys(uint64_t seed) : seed_(seed) {}
  /// Keys with a seed from default_generator(), which moves on by one key.
  static InitKeys next();
  InitKeys child(std::string_view name) const { return {seed_, prefix_ + std::string(name) + "."}; }
  /// i64 [2]: the seed and a hash (XXH3) of the full name.
  Tensor key(std::string_view parameter) const;

 private:
  InitKeys(uint64_t seed, std::string prefix) : seed_(seed), prefix_(std::move(prefix)) {}
  uint64_t seed_;
  std::string prefix_;
};

/// How constructors on this thread make parameters.
struct Building {
  std::optional<Device> device = {};  // none: default_device()
  bool draw = true;  // false: left without values, for init() or load_state() to fill
};
Building& building();
/// Where constructors make parameters and buffers.
Device parameter_device();
/// Constructors in this scope leave parameters without values.
class SkipInit {
 public:
  SkipInit() : old_(building().draw) { building().draw = false; }
  ~SkipInit() { building().draw = old_; }
  SkipInit(const SkipInit&) = delete;
  SkipInit& operator=(const SkipInit&) = delete;

 private:
  bool old_;
};
/// Constructors in this scope make parameters on `device`; on kMeta a model of any size takes no
/// memory.
class OnDevice {
 public:
  explicit OnDevice(Device device) : old_(building().device) { building().device = device; }
  ~OnDevice() { building().device = old_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  std::optional<Device> old_;
};

// All of these overwrite `t` (a parameter may require grad) and skip meta tensors. Without a key
// they take the next of default_generator().
void zeros_(const Tensor& t);
void ones_(const Tensor& t);
void constant_(const Tensor& t, double value);
/// Uniform in [low, high).
void uniform_(const Tensor& t, double low = 0, double high = 1, const Tensor& key = {});
void normal_(const Tensor& t, double mean = 0, double std = 1, const Tensor& key = {});
/// Normal, truncated to [low, high], by inverting the cumulative distribution.
void trunc_normal_(const Tensor& t, double mean = 0, double std = 1, double low = -2,
                   double high = 2, const Tensor& key = {});

/// A weight [out, in, ...] sums over in * rest inputs and feeds out * rest outputs.
struct Fans {
  int64_t in, out;
};
Fans fans_of(const Shape& weight);

/// Uniform or normal with variance gain^2 * 2 / (fan_in + fan_out). Glorot, Bengio 2010.
void xavier_uniform_(const Tensor& t, double gain = 1, const Tensor& key = {});
void xavier_normal_(const Tensor& t, double gain = 1, const Tensor& key = {});
/// Variance 2 / (1 + slope^2) / fan_in, where `slope` is that of the leaky ReLU behind the layer.
/// He et al. 2015. Slope sqrt(5), the default of PyTorch's linear layers, gives the bound 1 /
/// sqrt(fan_in).
void kaiming_uniform_(const Tensor& t, double slope = 0, const Tensor& key = {});
void kaiming_normal_(const Tensor& t, double slope = 0, const Tensor& key = {});

}  // namespace tessera::nn
