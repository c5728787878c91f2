#include "collectives/nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "collectives/thread.h"
#include "core/backend/cuda/context.h"
#include "core/backend/cuda/copy.h"
#include "core/base/error.h"

namespace tessera::nccl {
namespace {

using ::tessera::detail::Part;
using ::tessera::detail::Parts;
using ::tessera::detail::Plan;

constexpr std::chrono::seconds kCloseTime{5};

DataType type_of(DType t) {
  switch (t) {
    case DType::kBool:
    case DType::kF8E4M3:  // moved, never reduced
    case DType::kF8E5M2:
    case DType::kU8: return DataType::kUint8;
    case DType::kI32: return DataType::kInt32;
    case DType::kI64: return DataType::kInt64;
    case DType::kF16: return DataType::kFloat16;
    case DType::kBF16: return DataType::kBfloat16;
    case DType::kF32: return DataType::kFloat32;
    case DType::kF64: return DataType::kFloat64;
  }
  throw BugError("nccl: a dtype without a name of NCCL's");
}

// On bools, which are 0 or 1, "any" is the larger one and "all" the smaller one.
std::optional<RedOp> operator_of(ReduceOp op, DType t) {
  const bool truth = t == DType::kBool;
  switch (op) {
    case ReduceOp::kSum: return truth ? RedOp::kMax : RedOp::kSum;
    case ReduceOp::kProduct: return truth ? RedOp::kMin : RedOp::kProd;
    case ReduceOp::kMin: return RedOp::kMin;
    case ReduceOp::kMax: return RedOp::kMax;
    case ReduceOp::kAvg: return RedOp::kAvg;
    case ReduceOp::kBitAnd: return truth ? std::optional(RedOp::kMin) : std::nullopt;
    case ReduceOp::kBitOr: return truth ? std::optional(RedOp::kMax) : std::nullopt;
    case ReduceOp::kBitXor: return std::nullopt;
  }
  return std::nullopt;
}

size_t bytes_of(const Part& p) { return size_t(p.bytes); }
Config config() {
  Config c;
  c.blocking = 0;
  return c;
}

}  // namespace

Error::Error(const char* symbol, Result result, Comm comm)
    : std::runtime_error([&] {
        const Functions* nccl = functions();
        const char* more = nccl->last_error(comm);
        return fmt::format("{}: {}{}{}", symbol, nccl->error_string(result),
                           more && *more ? "; " : "", more ? more : "");
      }()) {}

bool has_operator(ReduceOp op, DType dtype) { return operator_of(op, dtype).has_value(); }

Communicator::Communicator(int device, Comm comm)
    : nccl_(*functions()), device_(device), comm_(comm), stream_(device) {}

Communicator::Communicator(int device, int size, const UniqueId& id, int rank, const Pause& pause)
    : Communicator(device, nullptr) {
  const cuda::CurrentDevice current(device);
  Config c = config();
  try {
    check(nccl_.comm_init.result(&comm_, size, id, rank, &c), nccl_.comm_init.symbol());
    settle(nccl_.comm_init.symbol(), pause);
  } catch (...) {
    abort();
    throw;
  }
}

Communicator::~Communicator() {
  abort();
  if (aborting_.joinable()) aborting_.join();
}

void Communicator::check(Result result, const char* symbol) const {
  if (result != Result::kSuccess && result != Result::kInProgress)
    throw Error(symbol, result, comm_);
}

void Communicator::settle(const char* symbol, const Pause& pause) const {
  for (int turn = 0;; ++turn) {
    Result state = Result::kSuccess;
    check(nccl_.comm_async_error.result(comm_, &state), nccl_.comm_async_error.symbol());
    check(state, symbol);
    if (state == Result::kSuccess) return;
    pause();
    if (turn < 100)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Result Communicator::error() const {
  Result state = Result::kSuccess;
  const Result r = comm_ ? nccl_.comm_async_error.result(comm_, &state) : Result::kSuccess;
  if (r != Result::kSuccess) return r;
  return state == Result::kInProgress ? Result::kSuccess : state;
}

void Communicator::abort() {
  if (!comm_) return;
  const cuda::CurrentDevice current(device_);
  nccl_.comm_abort.result(std::exchange(comm_, nullptr));
}

void Communicator::abort_beside() {
  if (!comm_) return;
  aborting_ = ::tessera::detail::start_thread("tessera-abort",
                                              [this, comm = std::exchange(comm_, nullptr)] {
                                                const cuda::CurrentDevice current(device_);
                                                nccl_.comm_abort.result(comm);
                                              });
}

void Communicator::close() {
  if (aborting_.joinable()) aborting_.join();
  if (!comm_) return;
  const cuda::CurrentDevice current(device_);
  const auto until = std::chrono::steady_clock::now() + kCloseTime;
  try {
    while (!registered_.empty()) deregister(Registration(registered_.back()));
    check(nccl_.comm_finalize.result(comm_), nccl_.comm_finalize.symbol());
    settle(nccl_.comm_finalize.symbol(), [&] {
      if (std::chrono::steady_clock::now() > until) throw std::runtime_error("late");
    });
    nccl_.comm_destroy.result(std::exchange(comm_, nullptr));
  } catch (const std::runtime_error&) {  // it is given up on
    abort();
  }
}

std::unique_ptr<Communicator> Communicator::split(int color, int key, const Pause& pause) {
  const cuda::CurrentDevice current(device_);
  Comm made = nullptr;
  Config c = config();
  check(nccl_.comm_split.result(comm_, color < 0 ? kNoColor : color, key, &made, &c),
        nccl_.comm_split.symbol());
  settle(nccl_.comm_split.symbol(), pause);
  if (!made) return nullptr;
  std::unique_ptr<Communicator> part(new Communicator(device_, made));
  part->settle(nccl_.comm_split.symbol(), pause);
  return part;
}

Registration Communicator::register_memory(void* at, size_t bytes, const Pause& pause) {
  Registration made;
  const auto taken = [](Result r) { return r == Result::kSuccess || r == Result::kInProgress; };
  if (nccl_.has_windows &&
      taken(nccl_.window_register.result(comm_, at, bytes, &made.window, kWindowSymmetric)))
    settle(nccl_.window_register.symbol(), pause);
  if (!made && taken(nccl_.comm_register.result(comm_, at, bytes, &made.buffer)))
    settle(nccl_.comm_register.symbol(), pause);
  if (made) registered_.push_back(made);
  return made;
}

void Communicator::deregister(const Registration& registration) {
  if (!comm_ || std::erase(registered_, registration) == 0) return;
  if (registration.window) nccl_.window_deregister.result(comm_, registration.window);
  if (registration.buffer) nccl_.comm_deregister.result(comm_, registration.buffer);
}

void Communicator::submit(std::span<const Plan* const> plans, const Stream& on,
                          const Pause& pause) {
  const cuda::CurrentDevice current(device_);
  on_ = on;
  for (const Plan* plan : plans) copy_own(*plan);
  nccl_.group_start.result();
  try {
    for (const Plan* plan : plans) enqueue(*plan);
  } catch (...) {
    nccl_.group_end.result();
    throw;
  }
  check(nccl_.group_end.result(), nccl_.group_end.symbol());
  settle(nccl_.group_end.symbol(), pause);
}

// What a rank gives to itself where pieces are moved one by one.
void Communicator::copy_own(const Plan& p) const {
  const bool moves =
      p.kind == CollKind::kGather || p.kind == CollKind::kScatter || p.kind == CollKind::kAllToAll;
  if (!moves || !p.takes || !p.gives()) return;
  const Part& from = p.give[size_t(p.one_for_each ? p.rank : 0)];
  const Part& to = p.take[size_t(p.giver < 0 ? p.rank : 0)];
  if (from.bytes && from.data != to.data)
    cuda::copy(to.data, on_.device, from.data, on_.device, bytes_of(from), on_);
}

void Communicator::enqueue(const Plan& p) {
  const cuda::StreamHandle stream = cuda::handle_of(on_);
  const DataType type = type_of(p.dtype);
  const auto count = [&](const Part& part) { return bytes_of(part) / size_of(p.dtype); };
  const auto op = p.reduces ? *operator_of(p.op, p.dtype) : RedOp::kSum;
  const Part& own = p.gives() ? p.give[0] : p.take[0];
  switch (p.kind) {
    case CollKind::kAllReduce:
      return check(
          nccl_.all_reduce.result(own.data, p.take[0].data, count(own), type, op, comm_, stream),
          nccl_.all_reduce.symbol());
    case CollKind::kReduce:
      return check(nccl_.reduce.result(own.data, p.takes ? p.take[0].data : nullptr, count(own),
                                       type, op, p.record.peer, comm_, stream),
                   nccl_.reduce.symbol());
    case CollKind::kBroadcast:
      return check(nccl_.broadcast.result(own.data, own.data, bytes_of(own), DataType::kUint8,
                                          p.giver, comm_, stream),
                   nccl_.broadcast.symbol());
    case CollKind::kAllGather: return all_gather(p);
    case CollKind::kReduceScatter: return reduce_scatter(p);
    case CollKind::kGather:
    case CollKind::kScatter:
    case CollKind::kAllToAll: return exchange(p);
    case CollKind::kSend:
      return check(nccl_.send.result(own.data, bytes_of(own), DataType::kUint8, p.record.peer,
                                     comm_, stream),
                   nccl_.send.symbol());
    case CollKind::kRecv:
      return check(nccl_.recv.result(own.data, bytes_of(own), DataType::kUint8, p.record.peer,
                                     comm_, stream),
                   nccl_.recv.symbol());
    case CollKind::kBarrier: break;
  }
  throw BugError(fmt::format("nccl: no {}", name_of(p.kind)));
}

// Pieces that differ in size are broadcast one by one, as one call.
void Communicator::all_gather(const Plan& p) {
  const cuda::StreamHandle stream = cuda::handle_of(on_);
  if (p.record.form == 0)
    return check(nccl_.all_gather.result(p.give[0].data, p.take[0].data, bytes_of(p.give[0]),
                                         DataType::kUint8, comm_, stream),
                 nccl_.all_gather.symbol());
  for (int r = 0; r < p.size; ++r) {
    const Part& to = p.take[size_t(r)];
    const void* from = r == p.rank ? p.give[0].data : to.data;
    check(nccl_.broadcast.result(from, to.data, bytes_of(to), DataType::kUint8, r, comm_, stream),
          nccl_.broadcast.symbol());
  }
}

void Communicator::reduce_scatter(const Plan& p) {
  const cuda::StreamHandle stream = cuda::handle_of(on_);
  const DataType type = type_of(p.dtype);
  const RedOp op = *operator_of(p.op, p.dtype);
  const auto count = [&](const Part& part) { return bytes_of(part) / size_of(p.dtype); };
  if (p.record.form == 0)
    return check(nccl_.reduce_scatter.result(p.give[0].data, p.take[0].data, count(p.take[0]), type,
                                             op, comm_, stream),
                 nccl_.reduce_scatter.symbol());
  for (int r = 0; r < p.size; ++r) {
    const Part& from = p.give[size_t(r)];
    check(nccl_.reduce.result(from.data, r == p.rank ? p.take[0].data : nullptr, count(from), type,
                              op, r, comm_, stream),
          nccl_.reduce.symbol());
  }
}

// Each piece is a message; all of them proceed together.
void Communicator::exchange(const Plan& p) {
  const cuda::StreamHandle stream = cuda::handle_of(on_);
  for (int r = 0; r < p.size; ++r) {
    if (r == p.rank) continue;
    const bool they_take = p.kind != CollKind::kGather || r == p.record.peer;
    if (p.gives() && they_take)
      if (const Part& from = p.give[size_t(p.one_for_each ? r : 0)]; from.bytes)
        check(nccl_.send.result(from.data, bytes_of(from), DataType::kUint8, r, comm_, stream),
              nccl_.send.symbol());
    const bool they_give = p.giver < 0 || p.giver == r;
    if (p.takes && they_give)
      if (const Part& to = p.take[size_t(p.giver < 0 ? r : 0)]; to.bytes)
        check(nccl_.recv.result(to.data, bytes_of(to), DataType::kUint8, r, comm_, stream),
              nccl_.recv.symbol());
  }
}

}  // namespace tessera::nccl
