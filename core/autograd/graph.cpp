#include "core/autograd/graph.h"

#include "core/dispatch/context.h"

namespace tessera {
namespace {

uint64_t& newest_number() {
  thread_local uint64_t number = 0;
  return number;
}

}  // namespace

GradNode::GradNode() : number(++newest_number()) {}
uint64_t GradNode::last_number() { return newest_number(); }

// A long chain of nodes would otherwise be freed by recursion as deep as the chain.
GradNode::~GradNode() {
  std::vector<Ref<GradMeta>> doomed;
  for (auto& meta : inputs) doomed.push_back(std::move(meta));
  while (!doomed.empty()) {
    Ref<GradMeta> meta = std::move(doomed.back());
    doomed.pop_back();
    if (!meta || meta->use_count() > 1 || !meta->producer || meta->producer->use_count() > 1)
      continue;
    for (auto& next : meta->producer->inputs) doomed.push_back(std::move(next));
  }
}

void attach_grad_meta(const Tensor& t, Ref<GradNode> producer, int output) {
  auto meta = make_ref<GradMeta>();
  meta->producer = std::move(producer);
  meta->output = output;
  t.impl()->autograd = std::move(meta);
  t.impl()->layers |= bit(Layer::kAutograd);
}

SavedTensor SavedTensor::input(const Tensor& t) {
  TESSERA_CHECK(!t.impl()->inference,
                "backward: {} was made in inference mode and cannot be saved; clone it outside",
                describe(t));
  SavedTensor s;
  s.tensor_ = t;
  s.version_ = t.storage() ? t.storage()->version() : 0;
  return s;
}

SavedTensor SavedTensor::result(const Tensor& t, int output) {
  SavedTensor s = input(t.detach());
  s.output_ = int8_t(output);
  return s;
}

SavedTensor SavedTensor::shape_only(const Tensor& t) {
  SavedTensor s;
  s.tensor_ = Tensor(t.meta(), nullptr);
  return s;
}

Tensor SavedTensor::unpack(std::string_view op, const char* what, size_t index,
                           const Ref<GradNode>& owner) const {
  if (tensor_.defined() && tensor_.storage())
    TESSERA_CHECK(
        tensor_.storage()->version() == version_,
        "{}: {} {} ({}) was overwritten after it was saved for backward; copy it before writing",
        op, what, index, describe(tensor_));
  // History matters only to a backward that is recorded itself.
  if (output_ < 0 || !owner || !(context().enabled & bit(Layer::kAutograd))) return tensor_;
  Tensor t = tensor_.detach();
  attach_grad_meta(t, owner, output_);
  return t;
}

}  // namespace tessera
