#include "examples/bench/recorder.h"

#include "core/ops/contract_attributes.h"
#include "core/primitive/primitive_of.h"
#include "examples/bench/measure.h"

namespace tessera::bench {
namespace {

bool is_attention(const Primitive& p) {
  return p.name() == "attention" || p.name() == "attention_grad";
}

std::string with_shapes(const Primitive& prim, Inputs in) {
  std::string text = to_string(prim);
  for (size_t i = 0; i < in.size() && i < 3; ++i) text += " " + to_string(in[i].shape());
  return in.size() > 3 ? text + " .." : text;
}

}  // namespace

// One op being run; the ops that it runs inside subtract their time from its time.
class RecordingBackend::Frame {
 public:
  Frame(RecordingBackend& to, const Primitive& prim, Inputs in)
      : to_(to),
        outer_(to.inner_),
        name_(prim.name()),
        detail_(with_shapes(prim, in)),
        attention_(is_attention(prim)) {
    if (to.attention_depth_ == 0) to.note_contractions(prim, in);
    to.attention_depth_ += attention_;
    to.inner_ = this;
    watch_ = Stopwatch();
  }
  ~Frame() {
    double all = watch_.seconds(), own = all - nested_;
    for (OpTime* t : {&to_.times_[name_], &to_.detailed_[detail_]}) ++t->calls, t->seconds += own;
    if (outer_) outer_->nested_ += bookkeeping_.seconds();
    to_.attention_depth_ -= attention_;
    to_.inner_ = outer_;
  }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

 private:
  RecordingBackend& to_;
  Frame* outer_;
  Stopwatch bookkeeping_;  // the frame's own cost, which is counted for no op
  std::string name_, detail_;
  bool attention_;
  double nested_ = 0;
  Stopwatch watch_;
};

Tensors RecordingBackend::run(const PrimRef& prim, Inputs in) {
  Frame frame(*this, *prim, in);
  return eager_backend().run(prim, in);
}

void RecordingBackend::assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) {
  Frame frame(*this, *prim, in);
  eager_backend().assign(dst, prim, in);
}

void RecordingBackend::clear() { times_.clear(), detailed_.clear(), contractions_ = {}; }

void RecordingBackend::note_contractions(const Primitive& prim, Inputs in) {
  std::vector<Product>& products = contractions_.products;
  if (prim.name() == "contract") {
    const auto& c = attributes_of<ContractAttributes>(prim);
    products.push_back(make_product(c.a, c.b, c.out, in[0].meta(), in[1].meta()));
  } else if (prim.name() == "attention") {
    for (Product& p : attention_products(in[0].meta(), in[1].meta(), in[2].meta()))
      products.push_back(p);
  } else if (prim.name() == "attention_grad") {
    for (Product& p :
         attention_grad_products(in[0].meta(), in[1].meta(), in[2].meta(), in[3].meta()))
      products.push_back(p);
  } else if (auto c = convolution_of(prim, in)) {
    contractions_.convolutions.push_back(*c);
  }
}

}  // namespace tessera::bench
