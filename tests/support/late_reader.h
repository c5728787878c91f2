// A reader that reads only when a thread waits for it. What it then finds tells whether a writer
// overwrote the memory too early.
#pragma once
#include <vector>

#include "core/base/error.h"
#include "core/tensor/tensor.h"

namespace tessera::test {

class LateReader final : public Event {
 public:
  explicit LateReader(const Tensor& f32)
      : from_(f32.values<float>()), numel_(size_t(f32.numel())) {}
  bool done() const override { return done_; }
  void wait() override {
    if (!done_) read.assign(from_, from_ + numel_);
    done_ = true;
    if (fails) throw UserError("the reader failed");
  }
  std::vector<float> read;
  bool fails = false;

 private:
  const float* from_;
  size_t numel_;
  bool done_ = false;
};

/// Registers one for the values of `f32` (dense).
inline Ref<LateReader> read_late(const Tensor& f32) {
  auto reader = make_ref<LateReader>(f32);
  f32.storage()->add_reader(reader);
  return reader;
}

}  // namespace tessera::test
