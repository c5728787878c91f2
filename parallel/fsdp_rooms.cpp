#include "parallel/fsdp_rooms.h"

#include <algorithm>

#include "core/dispatch/context.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/memory_label.h"
#include "parallel/fsdp_state.h"

namespace tessera::parallel::fsdp {
namespace {

// Lets the storage have memory of its own, with the same values.
void move_out(const Ref<Storage>& s, const Stream& stream) {
  const Device device = s->device();
  const auto own = make_ref<Storage>(s->bytes(), device, allocator_of(device));
  s->wait_writable(stream);
  runtime_of(device).copy(own->data(), device, s->data(), device, s->bytes(), stream);
  s->provide(own);
}

}  // namespace

Ref<Storage> Parts::next(size_t bytes) {
  auto* at = static_cast<std::byte*>(block_->data()) + at_;
  at_ += size_of_part(bytes);
  TESSERA_ASSERT(at_ <= block_->bytes(), "a part of {} bytes in a block of {}", bytes,
                 block_->bytes());
  return make_ref<Storage>(at, bytes, block_->device(), Ref<RefCounted>(block_));
}

void Room::take(size_t user, std::span<const size_t> sizes) {
  const Stream stream = stream_of(block_->device());
  for (const Ref<Storage>& s : parts_) {
    if (s->use_count() > 1) move_out(s, stream);
    // Its end then waits for nothing.
    s->wait_writable(stream);
    s->used_on(stream, /*writes=*/true);
  }
  user_ = user;
  parts_.clear();
  Parts parts(block_);
  for (size_t bytes : sizes) parts_.push_back(parts.next(bytes));
}

bool Room::has(const Storage* part) const {
  return std::ranges::any_of(parts_, [&](const Ref<Storage>& p) { return p.get() == part; });
}

std::vector<size_t> State::parts_of(const Group& g, bool gathered) const {
  std::vector<size_t> sizes;
  for (const Param& p : g.params) {
    DType dtype = p.leaf.dtype();
    if (!gathered) dtype = options_.precision.reduce.value_or(dtype);
    if (gathered && p.eight) dtype = kF8E4M3;
    const bool used = p.even && (gathered || p.trainable());
    const size_t whole = used ? size_t(numel(local_of(p.leaf).shape())) * size_of(dtype) : 0;
    sizes.push_back(whole / size_t(process_group().size())), sizes.push_back(whole);
  }
  return sizes;
}

bool State::make_rooms(std::vector<Room>& rooms, bool gathered) {
  ProcessGroup& group = process_group();
  if (context().records || card_.is_cpu() || !group.has_own_memory(card_)) return false;
  if (!rooms.empty()) return true;
  std::vector<size_t> bytes{0};
  size_t most = 0, others = 0;
  for (const Group& g : groups_) {
    size_t sum = 0;
    for (size_t part : parts_of(g, gathered)) sum += Parts::size_of_part(part);
    if (g.is_root)
      bytes[0] = sum;
    else if (++others; gathered && !options_.reshard_after_forward)
      bytes.push_back(sum);
    else
      most = std::max(most, sum);
  }
  if (bytes.size() == 1) bytes.resize(1 + std::min<size_t>(others, 2), most);
  const MemoryLabel label(gathered ? MemoryUse::kParameters : MemoryUse::kGradients,
                          "rooms of fully_shard");
  std::vector<Room> made;
  for (size_t b : bytes) made.push_back(Room(group.allocate(b, card_)));
  if (!group.has_own_memory(card_)) return false;
  for (const Room& r : made) memory_.rooms += r.bytes();
  rooms = std::move(made);
  return true;
}

}  // namespace tessera::parallel::fsdp
