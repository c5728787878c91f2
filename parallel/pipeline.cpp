#include "parallel/pipeline.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>

#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/default_device.h"
#include "core/io/hash.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "dtensor/dtensor.h"

namespace tessera::parallel {
namespace {

using Clock = std::chrono::steady_clock;

/// The message that a stage sends ahead of the first of several activations with the same shape and
/// dtype. The random keys of a micro-batch continue where the stage before stopped.
struct Header {
  int64_t schedule_hash = 0, micro_batches = 0;
  int64_t run = 0;  // number of such activations, the first included
  int64_t dtype = 0, ndim = 0;
  std::array<int64_t, kMaxDims> extents = {};
  int64_t seed = 0, next_key = 0;
};
constexpr int64_t kHeaderWords = sizeof(Header) / sizeof(int64_t);
using HeaderWords = std::array<int64_t, size_t(kHeaderWords)>;

Tensor to_tensor(const Header& h) {
  return from_values<int64_t>(std::bit_cast<HeaderWords>(h), {kHeaderWords});
}
Header to_header(const Tensor& t) {
  HeaderWords words;
  std::copy_n(t.values<int64_t>(), words.size(), words.begin());
  return std::bit_cast<Header>(words);
}
void set_meta(Header& h, const Meta& m) {
  h.dtype = int64_t(m.dtype);
  h.ndim = m.shape.size();
  std::copy(m.shape.begin(), m.shape.end(), h.extents.begin());
}
Meta meta_of(const Header& h) {
  return Meta::contiguous(Shape(std::span(h.extents.data(), size_t(h.ndim))), DType(h.dtype),
                          default_device());
}
bool alike(const Meta& a, const Meta& b) { return a.shape == b.shape && a.dtype == b.dtype; }

/// Returns shape and history of `t` without its values. Backward needs no more to begin, so an
/// activation that was not saved is freed once it is sent.
Tensor history_of(const Tensor& t) {
  if (!t.requires_grad()) return {};
  Tensor h(t.meta(), nullptr);
  h.impl()->autograd = t.impl()->autograd;
  h.impl()->layers |= bit(Layer::kAutograd);
  return h;
}

}  // namespace

/// One step, from the first message to the last.
class Pipeline::Run {
 public:
  Run(Pipeline& pipeline, std::span<const MicroBatch> batch, const StageLoss& loss, bool train)
      : p_(pipeline),
        batch_(batch),
        loss_(loss),
        train_(train),
        stage_(pipeline.stage()),
        last_(pipeline.stages() - 1),
        live_(batch.size()) {
    const Tensor state = on_host(default_generator().state());
    first_state_ = {state.values<int64_t>()[0], state.values<int64_t>()[1]};
  }

  Tensor operator()() {
    check_batch();
    for (const Action& a : p_.schedule_.stages[size_t(stage_)]) {
      Live& m = live_[size_t(a.micro_batch)];
      switch (a.kind) {
        case ActionKind::kRecvActivation: recv_activation(m); break;
        case ActionKind::kForward: forward(m, a.micro_batch); break;
        case ActionKind::kSendActivation: send_activation(m, a.micro_batch); break;
        case ActionKind::kRecvGradient:
          if (train_) recv_gradient(m);
          break;
        case ActionKind::kBackward:
          if (train_) backward(m);
          break;
        case ActionKind::kSendGradient:
          if (train_) send_gradient(m);
          break;
      }
    }
    return share_losses();
  }

  int peak_live() const { return peak_live_; }
  double waited_ms() const { return waited_ms_; }

 private:
  struct Live {  // one micro-batch on this stage
    Tensor in, out, root, loss;
    Tensor grad;         // of the root, then of the input
    Ref<Work> arriving;  // of `in`, then of `grad`
    Meta in_meta, out_meta;
    int64_t run = 0;  // > 0: the first of this many with the same shape and dtype
    int64_t seed = 0, next_key = 0;
  };

  void check_batch() {
    for (size_t k = 0; k < batch_.size(); ++k) {
      TESSERA_CHECK(stage_ > 0 || batch_[k].input.defined(),
                    "pipeline: micro-batch {} has no input; the first stage reads it", k);
      TESSERA_CHECK(stage_ < last_ || batch_[k].target.defined(),
                    "pipeline: micro-batch {} has no target; the last stage reads it", k);
    }
    if (stage_ > 0) return;
    // Counts runs of inputs with the same shape and dtype, in the order in which they are used.
    Live* head = nullptr;
    const MicroBatch* previous = nullptr;
    for (const Action& a : p_.schedule_.stages[0]) {
      if (a.kind != ActionKind::kForward) continue;
      const MicroBatch& b = batch_[size_t(a.micro_batch)];
      if (!previous || !alike(previous->input.meta(), b.input.meta()))
        head = &live_[size_t(a.micro_batch)];
      ++head->run;
      previous = &b;
    }
  }

  template <class F>
  void timed(F wait) {
    auto start = Clock::now();
    wait();
    waited_ms_ += std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  }

  /// Sends to one neighbour are made one at a time: the deadline of each begins when it is its
  /// turn, and at most one activation is kept for sending.
  void send(const Tensor& t, int to) {
    Ref<Work>& previous = sending_[to > stage_];
    if (previous) timed([&] { previous->wait(); });
    previous = p_.group_->send_async(t, to);
  }

  void recv_activation(Live& m) {
    if (run_left_ == 0) {
      Tensor words = empty({kHeaderWords}, kI64);
      timed([&] { p_.group_->recv(words, stage_ - 1); });
      received_ = to_header(words);
      check_header();
      m.run = run_left_ = received_.run;
    }
    --run_left_;
    m.in_meta = meta_of(received_);
    m.seed = received_.seed;
    m.next_key = received_.next_key;
    m.in = empty(m.in_meta);
    m.arriving = p_.group_->recv_async(m.in, stage_ - 1);
  }

  void check_header() const {
    TESSERA_CHECK(received_.micro_batches == int64_t(batch_.size()),
                  "pipeline: stage {} was given {} micro-batches, stage {} {}; give all the same "
                  "number",
                  stage_, batch_.size(), stage_ - 1, received_.micro_batches);
    TESSERA_CHECK(received_.schedule_hash == p_.schedule_hash_,
                  "pipeline: stages {} and {} run different schedules; this stage runs\n{}",
                  stage_ - 1, stage_, p_.schedule_.to_string());
  }

  void forward(Live& m, int k) {
    const MicroBatch& b = batch_[size_t(k)];
    if (stage_ == 0) {
      m.in = b.input;
      m.seed = first_state_.first, m.next_key = first_state_.second;
    } else {
      timed([&] { m.arriving->wait(); });
      m.arriving = {};
      if (train_) m.in.requires_grad_();
    }
    SampleScope samples(b.samples.defined() ? b.samples : context().samples);
    Generator generator{uint64_t(m.seed)};
    generator.seek(uint64_t(m.next_key));
    Scoped<Generator*> own(context().generator, &generator);
    RunningStatistics* statistics = train_ ? p_.options_.statistics : nullptr;
    if (statistics) statistics->before(forwards_, batch_.size());
    m.out = p_.options_.forward ? p_.options_.forward(m.in, b) : (*p_.stage_)(m.in);
    if (statistics) statistics->after(forwards_, batch_.size());
    ++forwards_;
    if (stage_ == last_) {
      m.loss = loss_(m.out, b.target);
      m.out = {};
      if (train_) m.root = batch_.size() > 1 ? m.loss * (1.0 / double(batch_.size())) : m.loss;
      m.loss = m.loss.detach();
    }
    m.next_key = generator.state().values<int64_t>()[1];
    after_keys_ = std::max(after_keys_, m.next_key);
    if (!train_) m.in = {};
    peak_live_ = std::max(peak_live_, ++alive_);
  }

  void send_activation(Live& m, int k) {
    Tensor out = std::exchange(m.out, {});
    TESSERA_CHECK(
        !out.is_sharded() && is_floating(out.dtype()),
        "pipeline: stage {} gives {}{}; a stage gives a plain float tensor (full_tensor() "
        "makes a sharded one plain)",
        stage_, describe(out), out.is_sharded() ? ", sharded" : "");
    if (m.run > 0) {
      sent_ = {.schedule_hash = p_.schedule_hash_,
               .micro_batches = int64_t(batch_.size()),
               .run = m.run,
               .seed = m.seed,
               .next_key = m.next_key};
      set_meta(sent_, out.meta());
      send(to_tensor(sent_), stage_ + 1);
    }
    TESSERA_CHECK(
        alike(out.meta(), meta_of(sent_)) && m.next_key == sent_.next_key,
        "pipeline: stage {} gave {} for micro-batch {} after drawing up to key {}; for an "
        "input of the same shape it gave {}{} up to key {}; both must follow from the "
        "input's shape",
        stage_, describe(out), k, m.next_key, name_of(DType(sent_.dtype)),
        to_string(meta_of(sent_).shape), sent_.next_key);
    m.out_meta = meta_of(sent_);
    if (train_) m.root = history_of(out);
    send(out.detach().contiguous(), stage_ + 1);
  }

  void recv_gradient(Live& m) {
    m.grad = empty(m.out_meta);
    m.arriving = p_.group_->recv_async(m.grad, stage_ + 1);
  }

  void backward(Live& m) {
    if (p_.options_.set_sync) p_.options_.set_sync(++backwards_ == batch_.size());
    if (m.arriving) timed([&] { m.arriving->wait(); });
    m.arriving = {};
    Tensor root = std::exchange(m.root, {}), grad = std::exchange(m.grad, {});
    if (root.defined() && root.requires_grad()) tessera::backward(root, grad);
    if (stage_ > 0) m.grad = m.in.grad();
    m.in = {};
    --alive_;
  }

  void send_gradient(Live& m) {
    Tensor grad = std::exchange(m.grad, {});
    if (!grad.defined()) grad = zeros(m.in_meta.shape, {.dtype = m.in_meta.dtype});
    send(grad.contiguous(), stage_ - 1);
  }

  /// The last stage sends the losses and the next random key to all stages.
  Tensor share_losses() {
    std::vector<int64_t> words;
    for (const Live& m : live_)
      words.push_back(m.loss.defined() ? std::bit_cast<int64_t>(m.loss.item<double>()) : 0);
    words.push_back(after_keys_);
    Tensor t = from_values<int64_t>(words, {int64_t(words.size())});
    timed([&] { p_.group_->broadcast(t, last_); });
    std::vector<double> losses;
    for (size_t k = 0; k < live_.size(); ++k)
      losses.push_back(std::bit_cast<double>(t.values<int64_t>()[k]));
    default_generator().seek(uint64_t(t.values<int64_t>()[live_.size()]));
    return from_values<double>(losses, {int64_t(losses.size())});
  }

  Pipeline& p_;
  std::span<const MicroBatch> batch_;
  const StageLoss& loss_;
  const bool train_;
  const int stage_, last_;
  std::vector<Live> live_;
  Header received_, sent_;
  int64_t run_left_ = 0;                     // activations that the last header still applies to
  std::pair<int64_t, int64_t> first_state_;  // of the generator: seed, next key
  int64_t after_keys_ = 0;
  Ref<Work> sending_[2];  // to the stage before, to the stage after
  size_t forwards_ = 0, backwards_ = 0;
  int alive_ = 0, peak_live_ = 0;
  double waited_ms_ = 0;
};

namespace {

Ref<ProcessGroup> line_of(const PipelineOptions& options) {
  if (!options.mesh.defined()) return world_group();
  TESSERA_CHECK(options.mesh.ndim() == 1,
                "pipeline: a mesh of {} axes ({}); give the one along which the stages lie, "
                "mesh[\"pp\"]",
                options.mesh.ndim(), options.mesh.to_string());
  return options.mesh.group(0);
}

}  // namespace

Pipeline::Pipeline(std::shared_ptr<nn::Module> stage, const PipelineOptions& options)
    : stage_(std::move(stage)),
      options_(options),
      group_(line_of(options)),
      parameters_(stage_, group_, options_.tied) {
  // Messages between cards pass through the host until a collective has brought the cards together.
  if (const Device device = default_device(); !device.is_cpu() && !device.is_meta())
    group_->all_reduce(zeros({1}, {kF32, device}));
}

void Pipeline::prepare(size_t micro_batches) {
  TESSERA_CHECK(micro_batches > 0, "pipeline: a step of no micro-batches; give at least one");
  if (schedule_.micro_batches == int(micro_batches)) return;
  Schedule s = options_.schedule(stages(), int(micro_batches));
  TESSERA_CHECK(int(s.stages.size()) == stages() && s.micro_batches == int(micro_batches),
                "pipeline: schedule {} is for {} stages and {} micro-batches; asked for {} and {}",
                s.name, s.stages.size(), s.micro_batches, stages(), micro_batches);
  check(s);
  schedule_ = std::move(s);
  std::string text = schedule_.to_string();
  schedule_hash_ = int64_t(io::xxh128(text.data(), text.size()).low);
}

Tensor Pipeline::run(std::span<const MicroBatch> batch, const StageLoss& loss, bool train) {
  prepare(batch.size());  // an error here is thrown on every rank, before anything is sent
  // Must outlive the abort, which ends the messages it waits for.
  Run run(*this, batch, loss, train);
  try {
    if (train) {
      if (!copies_checked_) parameters_.check_copies_equal();
      copies_checked_ = true;
      parameters_.check_copies_clear();
    }
    Tensor losses = run();
    if (train) parameters_.sum_gradients_of_copies(), peak_live_ = run.peak_live();
    waited_ms_ = run.waited_ms();
    return losses;
  } catch (const std::exception& e) {
    group_->abort(fmt::format("stage {} failed: {}", stage(), e.what()));
    throw;
  }
}

Tensor Pipeline::step(std::span<const MicroBatch> batch, const StageLoss& loss) {
  TESSERA_CHECK(grad_enabled(),
                "pipeline: step() while nothing is recorded; evaluate() runs forward only");
  return run(batch, loss, true);
}

Tensor Pipeline::evaluate(std::span<const MicroBatch> batch, const StageLoss& loss) {
  InferenceMode off;
  return run(batch, loss, false);
}

optim::Clip Pipeline::clip_grad_norm(double max_norm, const Tensor& grad_scale) const {
  std::vector<Tensor> mine;
  for (NamedTensor& p : parameters_.counted()) mine.push_back(std::move(p.tensor));
  optim::Clip own = optim::clip_grad_norm(mine, max_norm, {.grad_scale = grad_scale});
  double norm = full_tensor(own.norm).item<double>();
  Tensor squares = from_values<double>({norm * norm}, {1});
  group_->all_reduce(squares);
  Tensor total = scalar_tensor(std::sqrt(squares.item<double>()), kF64);
  NoGrad off;
  Tensor scale = minimum(max_norm / (total + 1e-6), 1.0);
  return {total, own.unscaled ? scale * grad_scale : scale, own.unscaled};
}

}  // namespace tessera::parallel
