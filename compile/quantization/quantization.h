// Inference in eight bits, after training:
//   auto prepared = quant::prepare(model);                    // the model in eval mode
//   for (const Tensor& x : batches) (*prepared)(x);           // calibration: values are watched
//   auto fast = quant::convert(prepared);                     // (*fast)(x), f32 in and out
// Convolutions and linear layers run on bytes with batch-norm, residual and relu in their epilogue;
// what is between them stays bytes where it can (views, relu, max-pool) and is f32 otherwise.
// Jacob et al. 2018, arXiv:1712.05877; names are those of torch.ao.quantization.
#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "compile/quantization/lower.h"
#include "compile/quantization/observer.h"
#include "compile/run/executor.h"
#include "core/nn/module.h"

namespace tessera::quant {

/// Identifies the contents of tensors by their memory and how often it was written. What was made
/// from the tensors is stale once this differs. Holds the memory, so that its address is not used
/// again.
struct Contents {
  struct Entry {
    Ref<Storage> storage;
    int64_t offset;
    uint32_t version;
    bool operator==(const Entry&) const = default;
  };
  std::vector<Entry> entries;
  void add(const Tensor& t) {
    entries.push_back({t.storage(), t.offset(), t.storage() ? t.storage()->version() : 0});
  }
  bool operator==(const Contents&) const = default;
};

struct PrepareOptions {
  Observer observer = Observer::kHistogram;  // of activations; weights are rounded by channel
  std::vector<std::string> keep_f32 = {};    // layers by path: "conv1", "fc"
};

/// A model under calibration: it returns the model's result, in f32, and observes values. A forward
/// that throws is not counted. Where the model's tensors change, layers are found anew, and what
/// was seen before still counts.
class Prepared final : public nn::Module {
 public:
  Prepared(std::shared_ptr<nn::Module> model, PrepareOptions options);
  const std::shared_ptr<nn::Module>& model() const { return model_; }
  const PrepareOptions& options() const { return options_; }
  /// Returns the scales that follow from the batches so far. Throws UserError naming a layer when
  /// there were no batches, and when the model's tensors changed after the last one.
  Decisions decide() const;

 protected:
  Tensor forward(Tensor x) override;

 private:
  std::shared_ptr<nn::Module> model_;
  PrepareOptions options_;
  std::vector<std::pair<Shape, std::shared_ptr<const Layers>>> layers_;  // by shape of x
  Contents contents_;  // the contents that layers_ were found for
  std::map<std::string, Observed> observed_;
};

/// A model on bytes. It takes x in f32 as the model does and returns f32. For every new shape of x
/// the f32 model, which is kept alive for this, is recorded once, and a graph for that shape is run
/// from then on. It is for inference only: no gradients, no autocast, not under compile(). Calls
/// from several threads take turns. state() holds weights (u8 around 128), their scales, biases,
/// and the scale and zero point of each value, and can be saved and loaded.
class Quantized final : public nn::Module {
 public:
  Quantized(std::shared_ptr<nn::Module> model, std::vector<std::string> keep_f32,
            const Decisions& decisions);
  ~Quantized() override;
  /// Prints a line for each layer (its kernel, the scales of what it reads and writes, what is
  /// folded into it), then what is computed in f32. Kernels are known after the first forward.
  std::string report() const;

 protected:
  Tensor forward(Tensor x) override;

 private:
  struct Part;
  struct Plan;
  Part& part(const std::string& path);
  Decisions decisions();
  Contents contents() const;
  Plan& plan_for(const Tensor& x);

  std::shared_ptr<nn::Module> model_;
  std::vector<std::string> keep_f32_;
  std::map<std::string, std::shared_ptr<Part>> parts_;
  std::vector<std::string> layers_, roots_;
  std::vector<std::unique_ptr<Plan>> plans_;
  mutable std::mutex running_;
};

/// Prepares `model` for calibration. It must take one tensor and return one, be in eval mode,
/// compute all floats in f32, and be on one rank.
std::shared_ptr<Prepared> prepare(std::shared_ptr<nn::Module> model, PrepareOptions options = {});
/// Makes a model on bytes; the calibrated model stays as it is. Throws UserError without
/// calibration.
std::shared_ptr<Quantized> convert(const std::shared_ptr<Prepared>& prepared);
/// Makes a model on bytes from the state() of a converted one and a `model` of the same
/// architecture, whose weights matter only for what runs in f32. Throws UserError for any other
/// state.
std::shared_ptr<Quantized> load(std::shared_ptr<nn::Module> model,
                                std::span<const NamedTensor> state,
                                std::vector<std::string> keep_f32 = {});

}  // namespace tessera::quant
