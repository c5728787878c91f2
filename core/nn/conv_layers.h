// Layers of convolutional networks, initialised as PyTorch does. The number in a name is that of
// spatial dims; x is [N, C, ..].
#pragma once
#include <optional>

#include "core/nn/module.h"
#include "core/ops/batch_norm.h"
#include "core/ops/conv.h"
#include "core/ops/interpolate.h"
#include "core/ops/layout.h"
#include "core/ops/pool.h"

namespace tessera::nn {

struct ConvOptions {
  int64_t in = 0, out = 0;  // channels
  PerDim kernel = 0;
  PerDim stride = 1;
  Padding padding = 0;
  PerDim dilation = 1;
  int64_t groups = 1;
  bool bias = true;
  PadMode padding_mode = PadMode::kConstant;  // what the padding holds; constant: zeros
};
/// weight [out, in / groups, kernel..], bias [out]: uniform in +-1/sqrt(in / groups * kernel).
class ConvNd : public Module {
 public:
  std::string describe() const override;
  void reset(const InitKeys& keys) override;
  Tensor weight, bias;
  const ConvOptions options;

 protected:
  ConvNd(int dims, ConvOptions options);
  Tensor forward(Tensor x) override;

 private:
  const int dims_;
};
struct Conv1d final : ConvNd {
  explicit Conv1d(const ConvOptions& o) : ConvNd(1, o) {}
  Conv1d(int64_t in, int64_t out, PerDim kernel, PerDim stride = 1, Padding padding = 0)
      : Conv1d(ConvOptions{in, out, kernel, stride, padding}) {}
};
struct Conv2d final : ConvNd {
  explicit Conv2d(const ConvOptions& o) : ConvNd(2, o) {}
  Conv2d(int64_t in, int64_t out, PerDim kernel, PerDim stride = 1, Padding padding = 0)
      : Conv2d(ConvOptions{in, out, kernel, stride, padding}) {}
};
struct Conv3d final : ConvNd {
  explicit Conv3d(const ConvOptions& o) : ConvNd(3, o) {}
  Conv3d(int64_t in, int64_t out, PerDim kernel, PerDim stride = 1, Padding padding = 0)
      : Conv3d(ConvOptions{in, out, kernel, stride, padding}) {}
};

struct ConvTransposeOptions {
  int64_t in = 0, out = 0;  // channels
  PerDim kernel = 0;
  PerDim stride = 1;
  PerDim padding = 0, output_padding = 0;
  int64_t groups = 1;
  bool bias = true;
  PerDim dilation = 1;
};
/// weight [in, out / groups, kernel..], bias [out]: uniform in +-1/sqrt(out / groups * kernel).
class ConvTransposeNd : public Module {
 public:
  std::string describe() const override;
  void reset(const InitKeys& keys) override;
  Tensor weight, bias;
  const ConvTransposeOptions options;

 protected:
  ConvTransposeNd(int dims, ConvTransposeOptions options);
  Tensor forward(Tensor x) override;

 private:
  const int dims_;
};
struct ConvTranspose1d final : ConvTransposeNd {
  explicit ConvTranspose1d(const ConvTransposeOptions& o) : ConvTransposeNd(1, o) {}
};
struct ConvTranspose2d final : ConvTransposeNd {
  explicit ConvTranspose2d(const ConvTransposeOptions& o) : ConvTransposeNd(2, o) {}
};
struct ConvTranspose3d final : ConvTransposeNd {
  explicit ConvTranspose3d(const ConvTransposeOptions& o) : ConvTransposeNd(3, o) {}
};

struct BatchNormOptions {
  int64_t channels = 0;
  double eps = 1e-5;
  std::optional<double> momentum = 0.1;  // none: running statistics are averages over all batches
  bool affine = true;
  bool track_running_stats = true;  // false: always the statistics of the batch
};
/// Statistics for batch-norm in training, perhaps of more than this x: what batch_norm_moments
/// returns, and the number of values per channel from which they were computed (0-d, f64).
struct SharedMoments {
  BatchMoments now;
  Tensor count;
};
using MomentsSource = std::function<SharedMoments(const Tensor& x, const Tensor& weight,
                                                  const Tensor& bias, double eps, const NormThen&)>;
/// Normalises by the statistics of the batch while training, which the running ones follow, and
/// otherwise by the running ones. weight [C] of ones, bias [C] of zeros; buffers running_mean [C]
/// of zeros, running_var [C] of ones, num_batches_tracked (i64).
class BatchNormNd : public Module {
 public:
  using Module::operator();
  /// relu(norm(x) + residual) in the passes of the norm; either may be left out.
  Tensor operator()(Tensor x, const NormThen& then);
  /// While it trains, statistics come from `source` (of other ranks too,
  /// parallel/sync_batch_norm.h) instead of from x alone; an empty one undoes that.
  void share_moments(MomentsSource source);
  bool shares_moments() const { return bool(source_); }
  std::string type_name() const override;
  std::string describe() const override;
  void reset(const InitKeys& keys) override;
  Tensor weight, bias, running_mean, running_var, num_batches_tracked;
  const BatchNormOptions options;

 protected:
  BatchNormNd(int least_dims, int most_dims, BatchNormOptions options);
  Tensor forward(Tensor x) override;

 private:
  Tensor normalized(const Tensor& x, const NormThen& then);
  Tensor factor() const;
  const int least_dims_, most_dims_;
  MomentsSource source_;
  TrackedChanges source_changes_;
};
struct BatchNorm1d final : BatchNormNd {  // [N, C] or [N, C, L]
  explicit BatchNorm1d(int64_t channels) : BatchNorm1d(BatchNormOptions{channels}) {}
  explicit BatchNorm1d(const BatchNormOptions& o) : BatchNormNd(2, 3, o) {}
};
struct BatchNorm2d final : BatchNormNd {
  explicit BatchNorm2d(int64_t channels) : BatchNorm2d(BatchNormOptions{channels}) {}
  explicit BatchNorm2d(const BatchNormOptions& o) : BatchNormNd(4, 4, o) {}
};
struct BatchNorm3d final : BatchNormNd {
  explicit BatchNorm3d(int64_t channels) : BatchNorm3d(BatchNormOptions{channels}) {}
  explicit BatchNorm3d(const BatchNormOptions& o) : BatchNormNd(5, 5, o) {}
};

struct GroupNormOptions {
  int64_t groups = 0, channels = 0;
  double eps = 1e-5;
  bool affine = true;
};
/// weight [C] of ones, bias [C] of zeros.
class GroupNorm final : public Module {
 public:
  explicit GroupNorm(GroupNormOptions options);
  GroupNorm(int64_t groups, int64_t channels) : GroupNorm(GroupNormOptions{groups, channels}) {}
  std::string describe() const override;
  void reset(const InitKeys& keys) override;
  Tensor weight, bias;
  const GroupNormOptions options;

 protected:
  Tensor forward(Tensor x) override;
};

std::shared_ptr<Conv1d> conv1d(const ConvOptions& options);
std::shared_ptr<Conv1d> conv1d(int64_t in, int64_t out, PerDim kernel, PerDim stride = 1,
                               Padding padding = 0);
std::shared_ptr<Conv2d> conv2d(const ConvOptions& options);
std::shared_ptr<Conv2d> conv2d(int64_t in, int64_t out, PerDim kernel, PerDim stride = 1,
                               Padding padding = 0);
std::shared_ptr<Conv3d> conv3d(const ConvOptions& options);
std::shared_ptr<Conv3d> conv3d(int64_t in, int64_t out, PerDim kernel, PerDim stride = 1,
                               Padding padding = 0);
std::shared_ptr<ConvTranspose1d> conv_transpose1d(const ConvTransposeOptions& options);
std::shared_ptr<ConvTranspose2d> conv_transpose2d(const ConvTransposeOptions& options);
std::shared_ptr<ConvTranspose3d> conv_transpose3d(const ConvTransposeOptions& options);
std::shared_ptr<BatchNorm1d> batch_norm1d(const BatchNormOptions& options);
std::shared_ptr<BatchNorm1d> batch_norm1d(int64_t channels);
std::shared_ptr<BatchNorm2d> batch_norm2d(const BatchNormOptions& options);
std::shared_ptr<BatchNorm2d> batch_norm2d(int64_t channels);
std::shared_ptr<BatchNorm3d> batch_norm3d(const BatchNormOptions& options);
std::shared_ptr<BatchNorm3d> batch_norm3d(int64_t channels);
std::shared_ptr<GroupNorm> group_norm(const GroupNormOptions& options);
std::shared_ptr<GroupNorm> group_norm(int64_t groups, int64_t channels);

struct InstanceNormOptions {
  int64_t channels = 0;
  double eps = 1e-5;
  bool affine = false;
};
/// A group norm with a group for every channel; it keeps no running statistics.
std::shared_ptr<GroupNorm> instance_norm1d(const InstanceNormOptions& options);
std::shared_ptr<GroupNorm> instance_norm2d(const InstanceNormOptions& options);
std::shared_ptr<GroupNorm> instance_norm3d(const InstanceNormOptions& options);
/// interpolate (core/ops/interpolate.h) as a module.
std::shared_ptr<Module> upsample(const InterpolateOptions& options);

/// Pools have no parameters: functions of core/ops/pool.h as modules, which print as "MaxPool2d".
std::shared_ptr<Module> max_pool1d(PerDim kernel, const MaxPoolOptions& options = {});
std::shared_ptr<Module> max_pool2d(PerDim kernel, const MaxPoolOptions& options = {});
std::shared_ptr<Module> max_pool3d(PerDim kernel, const MaxPoolOptions& options = {});
std::shared_ptr<Module> avg_pool1d(PerDim kernel, const AvgPoolOptions& options = {});
std::shared_ptr<Module> avg_pool2d(PerDim kernel, const AvgPoolOptions& options = {});
std::shared_ptr<Module> avg_pool3d(PerDim kernel, const AvgPoolOptions& options = {});
std::shared_ptr<Module> adaptive_avg_pool1d(PerDim output);
std::shared_ptr<Module> adaptive_avg_pool2d(PerDim output);
std::shared_ptr<Module> adaptive_avg_pool3d(PerDim output);
std::shared_ptr<Module> adaptive_max_pool1d(PerDim output);
std::shared_ptr<Module> adaptive_max_pool2d(PerDim output);
std::shared_ptr<Module> adaptive_max_pool3d(PerDim output);

}  // namespace tessera::nn
