#include "collectives/nccl/call.h"

#include <thread>

#include "core/backend/cuda/stream.h"

namespace tessera::nccl {

std::string CardCall::title() const {
  const std::string first = fmt::format("{} #{}", name_of(plan.kind), seq());
  return captured ? fmt::format("{}, the first of {} in a captured graph", first, captured) : first;
}

void CardCall::set_submitted(Ref<Event> begun, Ref<Event> ended, bool timed) {
  begun_ = std::move(begun), ended_ = std::move(ended), timed_ = timed;
  submitted_.store(true, std::memory_order_release);
}

void CardCall::see_end() {
  if (!owner_->failure()) ended_well_.store(true, std::memory_order_release);
}

void CardCall::hurry() {
  if (!submitted()) owner_->submit_put_off();
}

std::exception_ptr CardCall::error() const {
  return ended_well_.load(std::memory_order_acquire) ? nullptr : owner_->failure();
}

void CardCall::wait() {
  hurry();
  if (error()) owner_->throw_failure();
  ended_->wait();
  if (!ended_well_.load(std::memory_order_acquire)) see_end();
  if (error()) owner_->throw_failure();
}

bool CardCall::wait_for(Millis timeout) {
  hurry();
  const auto until = std::chrono::steady_clock::now() + timeout;
  while (!done() && !error()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  wait();
  return true;
}

void CardCall::wait_on(const Stream& stream) {
  hurry();
  if (!submitted()) return wait();  // which throws what kept it from being submitted
  ended_->wait_on(stream);
}

double CardCall::elapsed_ms() const {
  if (!timed_ || !done()) return 0;
  return cuda::elapsed_ms(static_cast<cuda::StreamEvent&>(*begun_),
                          static_cast<cuda::StreamEvent&>(*ended_));
}

}  // namespace tessera::nccl
