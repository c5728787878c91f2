#include "compile/run/host_numbers.h"

#include <cstring>

#include "core/tensor/device_runtime.h"

namespace tessera::compiler {
namespace {

// The values of the copies, side by side as in the block.
std::vector<char> values_of(const NumberCopies& c) {
  std::vector<char> values(c.bytes);
  for (const NumberCopies::Number& n : c.numbers) {
    n.from.storage()->wait_ready();
    const size_t size = size_of(n.from.dtype());
    const auto* from = static_cast<const char*>(n.from.raw_values());
    const int64_t stride = n.from.ndim() ? n.from.strides()[0] * int64_t(size) : 0;
    for (int64_t k = 0; k < n.from.numel(); ++k)
      std::memcpy(values.data() + n.offset + size_t(k) * size, from + k * stride, size);
  }
  return values;
}

}  // namespace

void HostNumbers::take_memory(Program& program) {
  release_memory();
  for (const Program::NumberBlock& b : program.blocks)
    blocks_.push_back(make_ref<Storage>(b.bytes, b.device, allocator_of(b.device)));
  last_.resize(program.copies.size());
  for (Memory& m : program.memories) {
    if (m.kind != Memory::Kind::kNumber) continue;
    const Ref<Storage>& block = blocks_[size_t(m.index)];
    void* data = static_cast<char*>(block->data()) + m.offset;
    bind(m, make_ref<Storage>(data, m.bytes, block->device(), block), 0);
  }
}

void HostNumbers::copy(const Program& program, size_t k) {
  const NumberCopies& c = program.copies[k];
  std::vector<char> values = values_of(c);
  if (values == last_[k]) return;
  last_[k].clear();  // until the copy is enqueued
  Storage& block = *blocks_[size_t(c.block)];
  const Device device = block.device();
  DeviceRuntime& runtime = runtime_of(device);
  Storage staged(c.bytes, kCPU, runtime.host_allocator());
  std::memcpy(staged.data(), values.data(), c.bytes);
  const Stream stream = stream_of(device);
  block.wait_writable(stream);
  if (runtime.copy(static_cast<char*>(block.data()) + c.begin, device, staged.data(), kCPU, c.bytes,
                   stream))
    if (Ref<Event> read = runtime.record(stream)) staged.add_reader(std::move(read));
  block.used_on(stream, /*writes=*/true);
  last_[k] = std::move(values);
}

}  // namespace tessera::compiler
