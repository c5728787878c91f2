#include "compile/codegen/device_kernels.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <exception>
#include <map>
#include <thread>

#include "compile/codegen/generate.h"
#include "compile/codegen/gpu_layout.h"
#include "core/base/parallel.h"
#include "core/io/hash.h"
#include "core/tensor/element.h"

namespace tessera::compiler {
namespace {

constexpr size_t kKernelsPerText =
    8;  // what precedes them takes as long to compile as some kernels

struct Distinct {
  DeviceSource source;
  Schedule schedule;
  GpuLayout layout;
  std::string symbol;
};

std::string symbol_of(const std::string& name, size_t number) {
  std::string symbol = fmt::format("k{}_", number);
  for (char c : name.substr(0, 80)) symbol += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return symbol;
}

// ---- which result may lie over which operand

// The nests that read operand `operand`, -1 for what is read outside of nests.
std::vector<int> readers(const Schedule& s, int operand) {
  std::vector<int> nests;
  auto loads = [&](InstrId id) {
    return s.instr(id).kind == InstrKind::kLoad && s.instr(id).operand == operand;
  };
  for (size_t n = 0; n < s.nests.size(); ++n)
    for (InstrId id : element_values(s, s.nests[n]))
      if (loads(id)) nests.push_back(int(n));
  for (size_t k = 0; k < s.values.size(); ++k)
    if (s.values[k].used && s.values[k].place != Place::kElement && loads(InstrId(k)))
      nests.push_back(-1);
  return nests;
}

bool read_at_the_end(const Schedule& s, int operand) {
  std::vector<InstrId> waiting;
  for (int k : s.late_stores) waiting.push_back(s.body.stores[size_t(k)].value);
  for (size_t at = 0; at < waiting.size(); ++at) {
    const Instr& i = s.instr(waiting[at]);
    if (i.kind == InstrKind::kLoad && i.operand == operand) return true;
    if (s.at(waiting[at]).reduce == ReduceAs::kNone)
      waiting.insert(waiting.end(), i.in.begin(), i.in.end());
  }
  return false;
}

// A thread reads an element before it writes there, and no other thread reads it then.
bool may_overwrite(const Schedule& s, const GpuLayout& g, int operand, int result) {
  const Access &from = s.body.operands[size_t(operand)], &to = s.body.stores[size_t(result)].to;
  const LoopMask all = s.outer_mask() | s.inner_mask();
  if (from.dtype != to.dtype || !(from.strides == to.strides)) return false;
  if (g.kind == GpuLayout::Kind::kElements) return moving_loops(to) == all;
  if (std::ranges::count(s.late_stores, result))  // all threads may read a number
    return moving_loops(to) != 0 || !read_at_the_end(s, operand);
  if (moving_loops(to) != all || read_at_the_end(s, operand)) return false;
  for (size_t n = 0; n < s.nests.size(); ++n)
    if (std::ranges::count(s.nests[n].stores, result))
      return std::ranges::all_of(readers(s, operand), [&](int reader) {
        return reader >= 0 && reader <= int(n) && s.nests[size_t(reader)].loops == s.inner_mask();
      });
  return false;
}

// A plan cannot say which result may lie over which operand: all may, or none.
bool may_run_in_place(const Distinct& d) {
  const Body& body = d.source.fused->body;
  for (size_t i = 0; i < body.operands.size(); ++i)
    for (size_t k = 0; k < body.stores.size(); ++k) {
      const Access &a = body.operands[i], &to = body.stores[k].to;
      const bool may_have_its_layout =
          a.dtype == to.dtype &&
          count_loops(body, moving_loops(a)) == count_loops(body, moving_loops(to));
      if (may_have_its_layout && !may_overwrite(d.schedule, d.layout, int(i), int(k))) return false;
    }
  return true;
}

// ---- kernels

uint32_t count_of(int64_t blocks) {
  TESSERA_CHECK(blocks < int64_t(1) << 31,
                "codegen: a kernel of {} blocks is more than a card runs", blocks);
  return uint32_t(blocks);
}

Ref<DeviceKernel> kernel_of(const Distinct& d) {
  const Schedule& s = d.schedule;
  auto k = make_ref<DeviceKernel>();
  k->size = {count_of(d.layout.blocks()), uint32_t(d.layout.block_threads())};
  k->scratch_bytes = gpu_scratch_bytes(s, d.layout);
  const bool columns = std::ranges::any_of(
      s.late_stores, [&](int n) { return moving_loops(s.body.stores[size_t(n)].to) != 0; });
  k->finish_size = {
      columns ? count_of((d.layout.columns + kFinishColumns - 1) / kFinishColumns) : 1,
      uint32_t(kFinishColumns * kFinishGroups)};
  k->numbers = d.source.numbers;
  auto align = [&](const Access& a) {
    k->align.push_back(in_packs(s, d.layout, a) ? size_of(a.dtype) * size_t(d.layout.width) : 1);
  };
  for (const Access& a : s.body.operands) align(a);
  for (const Store& st : s.body.stores) align(st.to);
  k->in_place = may_run_in_place(d);
  return k;
}

// Compiles kernels [begin, end) as one text.
void compile_part(Device device, std::span<const Distinct> part, std::span<Ref<DeviceKernel>> to) {
  std::string text = prologue_cuda();
  std::vector<std::string> entries;
  for (size_t k = 0; k < part.size(); ++k) {
    const Distinct& d = part[k];
    text += fmt::format("// {}\n", d.source.fused->name) +
            print_cuda(d.schedule, d.layout, d.symbol, d.source.numbers);
    to[k] = kernel_of(d);
    to[k]->entry = entries.size();
    entries.push_back(d.symbol);
    if (to[k]->scratch_bytes) entries.push_back(d.symbol + "_finish");
  }
  dump_source("", io::to_string(io::xxh128(text.data(), text.size())).substr(0, 8) + ".cu", text);
  const Ref<DeviceProgram> program =
      runtime_of(device).compile("generated", text, entries, device.index);
  for (Ref<DeviceKernel>& k : to) k->program = program;
}

std::vector<Ref<DeviceKernel>> compile_all(Device device, const std::vector<Distinct>& kernels) {
  std::vector<Ref<DeviceKernel>> made(kernels.size());
  const size_t parts = (kernels.size() + kKernelsPerText - 1) / kKernelsPerText;
  const size_t threads = std::min(parts, size_t(num_threads()));
  std::vector<std::exception_ptr> failed(threads);
  std::vector<std::jthread> others;  // joined also where one cannot be started
  auto work = [&](size_t thread) {
    try {
      for (size_t p = thread; p < parts; p += threads) {
        const size_t begin = p * kKernelsPerText,
                     count = std::min(kKernelsPerText, kernels.size() - begin);
        compile_part(device, std::span(kernels).subspan(begin, count),
                     std::span(made).subspan(begin, count));
      }
    } catch (...) {
      failed[thread] = std::current_exception();
    }
  };
  for (size_t t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  others.clear();
  for (const std::exception_ptr& e : failed)
    if (e) std::rethrow_exception(e);
  return made;
}

std::optional<std::pair<Schedule, GpuLayout>> spread(const Body& body) {
  std::optional<Schedule> s = make_schedule(body, Target::kCuda);
  if (!s) return {};
  std::optional<GpuLayout> g = make_gpu_layout(*s);
  if (!g) return {};
  return std::pair(std::move(*s), std::move(*g));
}

}  // namespace

bool generates_code(Device d) {
  return d.is_cpu() || (!d.is_meta() && runtime_of(d).compiles_cuda());
}

bool gpu_schedulable(const Body& body) { return spread(body).has_value(); }

void DeviceKernel::launch(std::span<const Tensor> in, std::span<const Tensor> out, void* scratch,
                          const Stream& stream) const {
  // Each parameter in eight bytes of its own: an address, or a number of the register's type.
  SmallVector<uint64_t, 16> values;
  bool whole = true;
  auto add = [&](const auto& x) {
    values.push_back(0);
    std::memcpy(&values[values.size() - 1], &x, sizeof(x));
  };
  auto add_address = [&](void* p) {
    whole = whole && reinterpret_cast<uintptr_t>(p) % align[values.size()] == 0;
    add(p);
  };
  for (size_t k = 0; k < in.size(); ++k) {
    const bool host = in[k].device() != stream.device;
    TESSERA_ASSERT(host == bool(numbers >> k & 1), "fused: operand {} is {}, made for a {}", k,
                   describe(in[k]),
                   numbers >> k & 1 ? "number of the host" : "tensor of the device");
    if (!host) {
      add_address(in[k].device_data());
      continue;
    }
    const DType t = in[k].dtype();
    const void* value = in[k].raw_values();
    if (t == kBool)
      add(read_integer(value, t) != 0);
    else if (is_integral(t))
      add(int64_t(read_integer(value, t)));
    else if (t == kF64)
      add(read_real(value, t));
    else
      add(float(read_real(value, t)));
  }
  for (const Tensor& t : out) add_address(t.device_data());
  add(scratch), add(whole);
  SmallVector<void*, 16> parameters;
  for (uint64_t& v : values) parameters.push_back(&v);
  parameters.push_back(nullptr);
  program->launch(entry, size, stream, parameters.data());
  if (scratch_bytes) program->launch(entry + 1, finish_size, stream, parameters.data());
}

std::vector<Ref<const DeviceKernel>> generate_on(Device device,
                                                 std::span<const DeviceSource> kernels) {
  std::vector<Distinct> distinct;
  std::map<std::pair<std::string, uint64_t>, size_t> by_text;
  std::vector<size_t> number;
  for (const DeviceSource& k : kernels) {
    auto [at, fresh] =
        by_text.emplace(std::pair(to_string(k.fused->body), k.numbers), distinct.size());
    number.push_back(at->second);
    if (!fresh) continue;
    auto found = spread(k.fused->body);
    TESSERA_ASSERT(found, "generate: {} has no layout on a device:\n{}", k.fused->name,
                   to_string(k.fused->body));
    distinct.push_back({k, std::move(found->first), std::move(found->second),
                        symbol_of(k.fused->name, distinct.size())});
  }
  const std::vector<Ref<DeviceKernel>> made = compile_all(device, distinct);
  std::vector<Ref<const DeviceKernel>> result;
  for (size_t k : number) result.push_back(made[k]);
  return result;
}

}  // namespace tessera::compiler
