#include "tests/compile/codegen/compare.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>

#include "compile/codegen/access_order.h"
#include "compile/codegen/device_kernels.h"
#include "core/backend/cuda/cubins.h"
#include "core/core.h"
#include "core/dispatch/copy.h"
#include "core/tensor/element.h"
#include "tests/support/fuzz.h"
#include "tests/support/temp_folder.h"

namespace tessera::test {

using namespace compiler;
namespace {

int64_t reach(const Body& body, const Access& a) {
  int64_t last = 0;
  for (size_t l = 0; l < a.strides.size(); ++l) last += (body.extents[l] - 1) * a.strides[l];
  return last + 1;
}

int64_t meta_numel(const Body& body, const Access& a) { return numel(meta_of(body, a).shape); }

bool rounds_to_16_bits(const Body& body) {
  for (const Instr& i : body.instrs)
    if (i.dtype == kF16 || i.dtype == kBF16) return true;
  return false;
}

// How close to the interpreter's value a result must be: equal bits; an equal number (a maximum of
// two zeros may be either); as close as functions of f64 of two math libraries are; or as close as
// the order of a sum permits.
enum class Near { kBits, kNumber, kLibrary, kRounding };

// Whether an instruction rounds once, or not at all, by any math library.
bool is_arithmetic(const Instr& i) {
  static const std::set<std::string_view> names = {"add",     "sub",     "mul",  "div",
                                                   "neg",     "abs",     "sign", "sqrt",
                                                   "maximum", "minimum", "relu", "where"};
  return names.count(i.op) > 0;
}

std::vector<Near> nearness(const Body& body, bool card) {
  std::vector<Near> near(body.instrs.size(), Near::kBits);
  for (size_t k = 0; k < body.instrs.size(); ++k) {
    const Instr& i = body.instrs[k];
    if (card && i.kind == InstrKind::kPointwise && i.dtype == kF64 && !is_arithmetic(i))
      near[k] = Near::kLibrary;
    if (i.kind == InstrKind::kReduce && is_floating(i.dtype))
      near[k] = i.reduce <= ReduceKind::kProd ? Near::kRounding : Near::kNumber;
    for (InstrId x : i.in) near[k] = std::max(near[k], near[size_t(x)]);
  }
  return near;
}

// Largest difference over the largest magnitude (or 1); NaN and infinities must be in the same
// places. `exact`: bits that differ are infinitely far, but for those of two NaN.
double difference(const Tensor& a, const Tensor& b, bool exact) {
  double most = 0, scale = 1;
  for (int64_t i = 0; i < a.numel(); ++i) {
    size_t at = size_t(i) * size_of(a.dtype());
    double x = read_real(static_cast<char*>(a.raw()) + at, a.dtype());
    double y = read_real(static_cast<char*>(b.raw()) + at, b.dtype());
    if (std::isnan(x) && std::isnan(y)) continue;
    if (exact && std::memcmp(static_cast<char*>(a.raw()) + at, static_cast<char*>(b.raw()) + at,
                             size_of(a.dtype())) != 0)
      return HUGE_VAL;
    if (std::isinf(x) && x == y) continue;
    if (!std::isfinite(x) || !std::isfinite(y)) return HUGE_VAL;
    most = std::max(most, std::abs(x - y)), scale = std::max(scale, std::abs(y));
  }
  return most / scale;
}

}  // namespace

const std::string& kernel_cache() {
  static TempFolder folder;
  static const std::string path = folder.str();
  return path;
}

StreamedFrom::StreamedFrom(int64_t bytes) {
  ::setenv("TESSERA_COMPILE_STREAM", std::to_string(bytes).c_str(), 1);
}
StreamedFrom::~StreamedFrom() { ::unsetenv("TESSERA_COMPILE_STREAM"); }

Tensor operand_of(const Body& body, size_t k, uint64_t seed) {
  const Access& a = body.operands[k];
  Tensor t = empty({reach(body, a)}, a.dtype);
  std::mt19937_64 random(seed * 1000003 + k);
  for (int64_t i = 0; i < t.numel(); ++i) {
    void* p = static_cast<char*>(t.raw()) + size_t(i) * size_of(a.dtype);
    if (is_floating(a.dtype))
      write_real(p, a.dtype, std::normal_distribution<double>(0, 1.5)(random));
    else
      write_integer(p, a.dtype, a.dtype == kBool ? int64_t(random() & 1) : int64_t(random() % 12));
  }
  return t;
}

Tensor result_of(const Body& body, size_t k) {
  const Access& a = body.stores[k].to;
  Tensor t = empty({reach(body, a)}, a.dtype);
  std::memset(t.raw(), a.dtype == kBool ? 1 : 0x5a, t.nbytes());
  return t;
}

bool may_overwrite(const Body& body, int operand, int result) {
  return AccessOrder(make_schedule(body).value()).may_overwrite(operand, result);
}

namespace {

Tensors operands_of(const Body& body, uint64_t seed) {
  Tensors in;
  for (size_t k = 0; k < body.operands.size(); ++k) in.push_back(operand_of(body, k, seed));
  return in;
}
Tensors copies(const Tensors& of) {
  Tensors list;
  for (const Tensor& t : of) list.push_back(clone(t));
  return list;
}
Tensors results_memory(const Body& body) {
  Tensors out;
  for (size_t k = 0; k < body.stores.size(); ++k) out.push_back(result_of(body, k));
  return out;
}

// Puts each operand under the first result that may be written over it, all at once, as a call
// does.
void overlay(const Body& body, const Tensors& operands, Tensors& results) {
  std::vector<bool> taken(operands.size());
  for (size_t r = 0; r < results.size(); ++r)
    for (size_t o = 0; o < operands.size(); ++o) {
      if (taken[o] || !may_overwrite(body, int(o), int(r))) continue;
      if (reach(body, body.stores[r].to) != meta_numel(body, body.stores[r].to)) continue;
      results[r] = operands[o], taken[o] = true;
      break;
    }
}

// Runs the chunks of `code` forwards or backwards.
void run(const KernelCode& code, const Tensors& in, const Tensors& out, bool backwards) {
  std::vector<char*> p;
  for (const Tensor& t : in) p.push_back(static_cast<char*>(t.raw()));
  for (const Tensor& t : out) p.push_back(static_cast<char*>(t.raw()));
  Tensor memory = empty({int64_t(code.scratch_bytes) + 64}, kU8);
  char* scratch = static_cast<char*>(memory.raw());
  if (!backwards) return run_code(code, p.data(), scratch);
  for (int64_t chunk = code.chunks; chunk-- > 0;) code.run(p.data(), chunk, scratch);
  if (code.finish) code.finish(p.data(), scratch);
}

void expect_equal_memory(const Tensors& a, const Tensors& b, const std::string& what) {
  for (size_t k = 0; k < a.size(); ++k)
    EXPECT_EQ(std::memcmp(a[k].raw(), b[k].raw(), a[k].nbytes()), 0) << what << ", result " << k;
}

// Expects the same bits from chunks in another order, and from each result written over each
// operand that it may be written over.
void expect_same_elsewhere(const Body& body, const KernelCode& code, const Tensors& drawn,
                           const Tensors& got) {
  auto fresh = [&] { return std::pair(copies(drawn), results_memory(body)); };
  auto [in, out] = fresh();
  run(code, in, out, true);
  expect_equal_memory(out, got, "backwards\n" + to_string(body));
  auto [all_operands, all_results] = fresh();
  overlay(body, all_operands, all_results);
  run(code, all_operands, all_results, false);
  expect_equal_memory(all_results, got, "results over operands\n" + to_string(body));
  for (size_t o = 0; o < body.operands.size(); ++o)
    for (size_t r = 0; r < body.stores.size(); ++r) {
      if (!may_overwrite(body, int(o), int(r))) continue;
      auto [operands, results] = fresh();
      // What lies between the elements of a result is the operand's here.
      if (reach(body, body.stores[r].to) != meta_numel(body, body.stores[r].to)) continue;
      results[r] = operands[o];
      run(code, operands, results, false);
      expect_equal_memory(results, got,
                          fmt::format("result {} over operand {}\n", r, o) + to_string(body) +
                              print_cpp(body, "kernel"));
    }
}

void expect_interpreted(const Body& body, const Tensors& drawn, const Tensors& got,
                        double tolerance, const std::string& text, bool card = false) {
  Tensors expected = results_memory(body);
  interpret_body(body, drawn, expected);
  std::vector<Near> near = nearness(body, card);
  for (size_t k = 0; k < got.size(); ++k) {
    const Near n = near[size_t(body.stores[k].value)];
    double bound = n < Near::kLibrary        ? 0
                   : rounds_to_16_bits(body) ? 1.0 / 50
                   : n == Near::kRounding    ? tolerance
                   : got[k].dtype() == kF64  ? 1e-10
                                             : 1e-6;
    EXPECT_LE(difference(got[k], expected[k], n == Near::kBits), bound)
        << "result " << k << "\n"
        << to_string(got[k]) << "\n"
        << to_string(expected[k]) << "\n"
        << to_string(body) << text;
  }
}

}  // namespace

void compare_with_interpreter(const std::vector<Body>& bodies, double tolerance,
                              const std::vector<uint64_t>& seeds) {
  std::vector<Ref<const Fused>> fused;
  std::vector<const Fused*> kernels;
  for (const Body& b : bodies) {
    check(b);
    fused.push_back(make_ref<const Fused>("test", b, results_of(b)));
    kernels.push_back(fused.back().get());
  }
  auto loaded = generate(kernels, {.cache_dir = kernel_cache()});
  for (size_t n = 0; n < bodies.size(); ++n) {
    const uint64_t seed = seeds.empty() ? n : seeds[n];
    const testing::ScopedTrace trace(__FILE__, __LINE__, seeds.empty() ? "" : run_again(seed));
    const Tensors drawn = operands_of(bodies[n], seed);
    Tensors got = results_memory(bodies[n]);
    run(loaded[n]->code, copies(drawn), got, false);
    expect_same_elsewhere(bodies[n], loaded[n]->code, drawn, got);
    expect_interpreted(bodies[n], drawn, got, tolerance, print_cpp(bodies[n], "kernel"));
  }
}

namespace {

Tensors on_device(const Tensors& of, Device device, int64_t offset, uint64_t numbers = 0) {
  Tensors list;
  for (size_t k = 0; k < of.size(); ++k) {
    if (numbers >> k & 1) {
      list.push_back(of[k]);
      continue;
    }
    Tensor memory = empty({of[k].numel() + offset}, of[k].dtype(), device);
    list.push_back(narrow(memory, 0, offset, of[k].numel()));
    copy_values(list.back(), of[k].to(device));
  }
  return list;
}
Tensors on_host(const Tensors& of) {
  Tensors list;
  for (const Tensor& t : of) list.push_back(t.to(kCPU).clone());
  for (const Tensor& t : list) t.raw();  // waits for the copy
  return list;
}

void launch(const DeviceKernel& kernel, const Tensors& in, const Tensors& out) {
  const Device device = out[0].device();
  Tensor scratch = empty({int64_t(kernel.scratch_bytes) + 1}, kU8, device);
  kernel.launch(in, out, scratch.device_data(), stream_of(device));
}

// Puts each operand under a result of its layout, as a plan allows all of them.
Tensors overlaid(const Body& body, const Tensors& operands, Tensors results, uint64_t numbers) {
  std::vector<bool> taken(operands.size());
  for (size_t r = 0; r < results.size(); ++r)
    for (size_t o = 0; o < operands.size(); ++o) {
      const Meta a = meta_of(body, body.operands[o]), b = meta_of(body, body.stores[r].to);
      const bool dense = reach(body, body.stores[r].to) == numel(b.shape);
      if (taken[o] || numbers >> o & 1 || a.dtype != b.dtype || !(a.shape == b.shape) ||
          !(a.strides == b.strides) || !dense)
        continue;
      results[r] = operands[o], taken[o] = true;
      break;
    }
  return results;
}

}  // namespace

int compare_on_device(Device device, const std::vector<Body>& bodies, double tolerance,
                      const std::vector<uint64_t>& seeds) {
  std::vector<Ref<const Fused>> fused;
  std::vector<DeviceSource> sources;
  std::vector<size_t> printed;
  for (size_t n = 0; n < bodies.size(); ++n) {
    if (!gpu_schedulable(bodies[n])) continue;
    Metas results = results_of(bodies[n]);
    for (Meta& m : results) m.device = device;
    uint64_t numbers = 0;
    for (size_t k = 0; k < bodies[n].operands.size(); ++k)
      if (reach(bodies[n], bodies[n].operands[k]) == 1 && (n + k) % 2) numbers |= uint64_t(1) << k;
    fused.push_back(make_ref<const Fused>("test", bodies[n], results));
    sources.push_back({fused.back().get(), numbers});
    printed.push_back(n);
  }
  const auto kernels = generate_on(device, sources);
  for (size_t k = 0; k < printed.size(); ++k) {
    const size_t n = printed[k];
    const uint64_t seed = seeds.empty() ? n : seeds[n], numbers = sources[k].numbers;
    const testing::ScopedTrace trace(__FILE__, __LINE__, seeds.empty() ? "" : run_again(seed));
    const Body& body = bodies[n];
    const Tensors drawn = operands_of(body, seed);
    const Tensors out = on_device(results_memory(body), device, 0);
    launch(*kernels[k], on_device(drawn, device, 0, numbers), out);
    const Tensors got = on_host(out);
    expect_interpreted(body, drawn, got, tolerance, print_cuda(body, "kernel"), true);
    const Tensors shifted = on_device(results_memory(body), device, 1);
    launch(*kernels[k], on_device(drawn, device, 1, numbers), shifted);
    expect_equal_memory(on_host(shifted), got, "not aligned\n" + to_string(body));
    if (!kernels[k]->in_place) continue;
    const Tensors in = on_device(drawn, device, 0, numbers);
    const Tensors over = overlaid(body, in, on_device(results_memory(body), device, 0), numbers);
    launch(*kernels[k], in, over);
    expect_equal_memory(on_host(over), got,
                        "results over operands\n" + to_string(body) + print_cuda(body, "kernel"));
  }
  return int(printed.size());
}

int compile_for_cards(const std::vector<Body>& bodies) {
  std::string text = prologue_cuda();
  int printed = 0;
  for (size_t i = 0; i < bodies.size(); ++i) {
    const std::string kernel = print_cuda(bodies[i], fmt::format("kernel_{}", i));
    printed += !kernel.empty(), text += kernel;
  }
  EXPECT_EQ(cuda::compile("kernels", text, "sm_90").log, "") << text;
  return printed;
}

}  // namespace tessera::test
