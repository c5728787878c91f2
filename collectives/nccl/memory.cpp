#include "collectives/nccl/memory.h"

#include <atomic>

#include "collectives/nccl/core.h"
#include "core/backend/cuda/context.h"
#include "core/backend/cuda/runtime.h"
#include "core/base/log.h"
#include "core/tensor/wait_ended.h"

namespace tessera::nccl {
namespace {

constexpr size_t kPage = 4096;  // of which windows consist

}  // namespace

OwnMemory::OwnMemory(Ref<GroupCore> owner, const OwnBlock& block, const Stream& home)
    : owner_(std::move(owner)), block_(block), home_(home), holder_(MemoryLabel::holder()) {
  cuda::count_outside(home_.device.index, holder_, block_.bytes, true);
}

OwnMemory::~OwnMemory() {
  cuda::count_outside(home_.device.index, holder_, block_.bytes, false);
  try {
    block_.unused = make_ref<cuda::StreamEvent>(home_);
  } catch (const tessera::Error&) {  // the card has failed: nothing runs there any more
  }
  owner_->drop(std::move(block_));
}

// False where the card has no memory. What allocators keep for later is in nobody's use.
bool GroupCore::take_memory(OwnBlock& block) {
  const Functions& nccl = *functions();
  {
    std::lock_guard lock(mutex_);
    if (dead()) throw_failure();
    submit_all_put_off();
    free_dropped();
  }
  // No lock is held: this may wait for calls that only the watching thread can end.
  if (nccl.mem_alloc.result(&block.at, block.bytes) == Result::kSuccess) return true;
  runtime_of(device_).release_cached_memory(device_.index);
  return nccl.mem_alloc.result(&block.at, block.bytes) == Result::kSuccess;
}

Ref<Storage> GroupCore::allocate(size_t bytes, detail::CardGroup::OnAll on_all) {
  const Functions& nccl = *functions();
  const cuda::CurrentDevice current(device_.index);
  OwnBlock block;
  block.bytes = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  const bool taken = take_memory(block);
  // Ranks wait for each other where they register it.
  bool all = false;
  try {
    all = on_all(taken);
  } catch (...) {
    if (taken) nccl.mem_free.result(block.at);
    throw;
  }
  if (!all) {
    if (taken) nccl.mem_free.result(block.at);
    return nullptr;
  }
  std::lock_guard lock(mutex_);
  if (dead()) throw_failure();
  detail::WaitFacts facts;
  facts.group = members_.group, facts.members = members_.world_ranks;
  facts.number = facts.seq = collectives_ + 1, facts.call = "allocate";
  try {
    with_nccl("allocate", std::move(facts), context_.timeout,
              [&](const Communicator::Pause& pause) {
                block.registration = lanes_[0].comm->register_memory(block.at, block.bytes, pause);
              });
  } catch (...) {
    drop(block);  // NCCL may have it registered
    throw;
  }
  if (!block.registration) {
    nccl.mem_free.result(block.at);
    return nullptr;
  }
  static std::atomic<bool> told = false;
  if (!block.registration.window && nccl.has_windows && members_.rank == 0 && !told.exchange(true))
    logging::warn(
        "{}: NCCL refuses windows of memory on {} and registers buffers instead, which is slower; "
        "NCCL_DEBUG=WARN says why",
        members_.group, to_string(device_));
  const Stream home = cuda::compute_stream(device_.index);
  return make_ref<Storage>(block.at, bytes, device_,
                           Ref<RefCounted>(new OwnMemory(Ref<GroupCore>(this), block, home)));
}

void GroupCore::drop(OwnBlock block) {
  std::lock_guard lock(dropped_mutex_);
  dropped_.push_back(std::move(block));
}

// The mutex is held, or nobody else is here any more.
void GroupCore::free_dropped() {
  std::lock_guard lock(dropped_mutex_);
  std::erase_if(dropped_, [&](const OwnBlock& block) {
    if (block.unused && !block.unused->done()) return false;
    free(block);
    return true;
  });
}

void GroupCore::free(const OwnBlock& block) {
  const cuda::CurrentDevice current(device_.index);
  lanes_[0].comm->deregister(block.registration);
  functions()->mem_free.result(block.at);
}

// Blocks whose storages the program still has keep the group from being destroyed. The ends of the
// communicators deregister what is registered, also where they are aborted.
void GroupCore::close_communicators() {
  std::vector<OwnBlock> blocks;
  {
    std::lock_guard lock(dropped_mutex_);
    blocks.swap(dropped_);
  }
  for (const OwnBlock& block : blocks)
    if (block.unused) wait_ended(*block.unused);
  for (Lane& lane : lanes_) lane.comm->close();
  for (const OwnBlock& block : blocks) free(block);
}

}  // namespace tessera::nccl
