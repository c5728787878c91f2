#include "examples/bench/contractions.h"

#include <fmt/core.h>

#include <algorithm>
#include <unordered_map>

#include "core/backend/cpu/onednn.h"
#include "core/base/error.h"
#include "examples/bench/measure.h"

namespace tessera::bench {
namespace {

using Loops = std::vector<ProductLoop>;

bool has(const std::string& word, char letter) { return word.find(letter) != std::string::npos; }

void push_merged(Loops& loops, const ProductLoop& l) {
  if (l.extent == 1) return;
  if (!loops.empty()) {
    ProductLoop& o = loops.back();
    if (o.a == l.a * l.extent && o.b == l.b * l.extent && o.c == l.c * l.extent) {
      o = {o.extent * l.extent, l.a, l.b, l.c};
      return;
    }
  }
  loops.push_back(l);
}

int64_t total(const Loops& loops) {
  int64_t n = 1;
  for (const ProductLoop& l : loops) n *= l.extent;
  return n;
}

// Takes the largest loop as a matrix dim; the others become batch dims.
ProductLoop take_largest(Loops& loops, Loops& batch) {
  if (loops.empty()) return {};
  auto largest = std::max_element(loops.begin(), loops.end(),
                                  [](auto& x, auto& y) { return x.extent < y.extent; });
  ProductLoop kept = *largest;
  loops.erase(largest);
  batch.insert(batch.end(), loops.begin(), loops.end());
  return kept;
}

Product dense_product(int64_t batch, int64_t m, int64_t n, int64_t k, const std::string& spec) {
  Product p;
  if (batch > 1) p.batch = {{batch, m * k, k * n, m * n}};
  p.m = {m, k, 0, n}, p.n = {n, 0, 1, 1}, p.k = {k, 1, n, 0};
  p.spec = spec;
  return p;
}

// Every operand needs unit stride in one of its two matrix dims, the result in n.
bool fits_a_matrix(const Product& p) {
  auto unit = [](const ProductLoop& x, const ProductLoop& y, int64_t ProductLoop::*stride) {
    return x.extent == 1 || y.extent == 1 || x.*stride == 1 || y.*stride == 1;
  };
  return unit(p.m, p.k, &ProductLoop::a) && unit(p.k, p.n, &ProductLoop::b) &&
         (p.n.extent == 1 || p.n.c == 1);
}

// Gives loops of extent 1 the stride of a dense matrix, which libraries require.
void set_strides_of_unit_loops(Product& p) {
  auto set_strides = [](ProductLoop& row, ProductLoop& column, int64_t ProductLoop::*s) {
    if (column.extent == 1 && row.extent == 1)
      column.*s = 1, row.*s = 1;
    else if (column.extent == 1)
      column.*s = row.*s == 1 ? row.extent : 1;
    else if (row.extent == 1)
      row.*s = column.*s == 1 ? column.extent : 1;
  };
  set_strides(p.m, p.k, &ProductLoop::a), set_strides(p.k, p.n, &ProductLoop::b),
      set_strides(p.m, p.n, &ProductLoop::c);
}

}  // namespace

double Product::flops() const {
  return 2.0 * double(total(batch)) * double(m.extent) * double(n.extent) * double(k.extent);
}

Product dense_form(const Product& p) {
  Product d = dense_product(total(p.batch), p.m.extent, p.n.extent, p.k.extent, p.spec);
  d.bf16 = p.bf16;
  return d;
}

Product make_product(const std::string& wa, const std::string& wb, const std::string& out,
                     const Meta& a, const Meta& b) {
  auto stride = [](const std::string& w, char l, const Meta& t) {
    return has(w, l) ? t.strides[int(w.find(l))] : 0;
  };
  auto extent = [&](char l) {
    return has(wa, l) ? a.shape[int(wa.find(l))] : b.shape[int(wb.find(l))];
  };
  Loops batch, m, n, k;
  int64_t step = 1;
  std::vector<int64_t> c_stride(out.size());
  for (size_t i = out.size(); i-- > 0;) c_stride[i] = step, step *= extent(out[i]);
  for (size_t i = 0; i < out.size(); ++i) {
    bool in_a = has(wa, out[i]), in_b = has(wb, out[i]);
    push_merged(in_a && in_b ? batch
                : in_a       ? m
                             : n,
                {extent(out[i]), stride(wa, out[i], a), stride(wb, out[i], b), c_stride[i]});
  }
  for (char l : wa)
    if (!has(out, l)) push_merged(k, {extent(l), stride(wa, l, a), stride(wb, l, b), 0});

  Product p;
  p.spec = fmt::format("{},{}->{}", wa, wb, out);
  p.bf16 = a.dtype == kBF16 && b.dtype == kBF16;
  int64_t b_all = total(batch), m_all = total(m), n_all = total(n), k_all = total(k);
  bool one_k = k.size() <= 1;
  p.k = k.empty() ? ProductLoop{} : k[0];
  p.batch = batch;
  p.m = take_largest(m, p.batch), p.n = take_largest(n, p.batch);
  set_strides_of_unit_loops(p);
  if (one_k && !fits_a_matrix(p) &&
      p.m.c == 1) {  // the transposed result is a matrix: swap the operands
    std::swap(p.m, p.n);
    for (ProductLoop* l : {&p.m, &p.n, &p.k}) std::swap(l->a, l->b);
    for (ProductLoop& l : p.batch) std::swap(l.a, l.b);
  }
  if (one_k && fits_a_matrix(p)) return p;
  Product dense = dense_product(b_all, m_all, n_all, k_all, p.spec);
  dense.plain = false, dense.bf16 = p.bf16;
  return dense;
}

std::vector<Product> attention_products(const Meta& q, const Meta& k, const Meta& v) {
  Meta scores =
      Meta::contiguous({q.shape[0], q.shape[1], q.shape[2], k.shape[2]}, q.dtype, q.device);
  return {make_product("bhtd", "bhsd", "bhts", q, k),
          make_product("bhts", "bhse", "bhte", scores, v)};
}

std::vector<Product> attention_grad_products(const Meta& g, const Meta& q, const Meta& k,
                                             const Meta& v) {
  Meta scores =
      Meta::contiguous({q.shape[0], q.shape[1], q.shape[2], k.shape[2]}, q.dtype, q.device);
  return {make_product("bhte", "bhse", "bhts", g, v),
          make_product("bhts", "bhte", "bhse", scores, g),
          make_product("bhts", "bhsd", "bhtd", scores, k),
          make_product("bhts", "bhtd", "bhsd", scores, q)};
}

namespace {

using cpu::engine;

dnnl::memory::desc operand(const Product& p, int64_t ProductLoop::*stride, const ProductLoop& row,
                           const ProductLoop& column) {
  dnnl::memory::dims dims, strides;
  for (const ProductLoop& l : p.batch) {
    bool repeated = l.*stride == 0;
    dims.push_back(repeated ? 1 : l.extent), strides.push_back(repeated ? 1 : l.*stride);
  }
  dims.push_back(row.extent), dims.push_back(column.extent);
  strides.push_back(row.*stride), strides.push_back(column.*stride);
  return {dims, p.bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32, strides};
}

}  // namespace

struct BareProduct::State {
  dnnl::stream stream{engine()};
  dnnl::matmul::primitive_desc description;
  dnnl::matmul primitive;
  std::vector<Tensor> buffers;
  std::unordered_map<int, dnnl::memory> arguments;

  explicit State(const Product& p) {
    auto a = operand(p, &ProductLoop::a, p.m, p.k), b = operand(p, &ProductLoop::b, p.k, p.n),
         c = operand(p, &ProductLoop::c, p.m, p.n);
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    description = cpu::description_of<dnnl::matmul>(attr, a, b, c);
    primitive = dnnl::matmul(description);
    const DType dtype = p.bf16 ? kBF16 : kF32;
    add(DNNL_ARG_SRC, a, dtype), add(DNNL_ARG_WEIGHTS, b, dtype), add(DNNL_ARG_DST, c, dtype);
    add(DNNL_ARG_SCRATCHPAD, description.scratchpad_desc(), kF32);
  }
  void add(int argument, const dnnl::memory::desc& d, DType dtype) {
    Tensor values = empty({int64_t(d.get_size() / size_of(dtype) + 16)});
    for (int64_t i = 0; i < values.numel(); ++i)
      values.data<float>()[i] = float(i % 7) * 0.25f - 0.75f;
    buffers.push_back(values.to(dtype));
    Tensor& t = buffers.back();
    arguments.emplace(argument, dnnl::memory(d, engine(), t.raw()));
  }
};

BareProduct::BareProduct(const Product& p) : state_(std::make_unique<State>(p)) {}
BareProduct::~BareProduct() = default;
BareProduct::BareProduct(BareProduct&&) noexcept = default;
void BareProduct::run() { state_->primitive.execute(state_->stream, state_->arguments); }
std::string BareProduct::implementation() const { return state_->description.impl_info_str(); }

double Contractions::flops() const {
  double sum = 0;
  for (const Product& p : products) sum += p.flops();
  for (const Convolution& c : convolutions) sum += c.flops();
  return sum;
}

BareStep::BareStep(const Contractions& all, bool dense) : flops_(all.flops()) {
  for (const Product& recorded : all.products) {
    Product p = dense ? dense_form(recorded) : recorded;
    size_t i = size_t(std::find(shapes_.begin(), shapes_.end(), p) - shapes_.begin());
    if (i == shapes_.size()) shapes_.push_back(p), prepared_.emplace_back(p), calls_.push_back(0);
    ++calls_[i], order_.push_back(i);
  }
  std::unordered_map<std::string, size_t> seen;
  for (const Convolution& c : all.convolutions) {
    auto [found, first] = seen.emplace(c.text(), convolutions_.size());
    if (first) convolutions_.emplace_back(c);
    convolution_order_.push_back(found->second);
  }
}

void BareStep::print_shapes() {
  fmt::print("{:>5} {:>10} {:>8}  {:<22} {:<34} {}\n", "calls", "us a call", "GF/s", "product",
             "batch x m x n x k", "oneDNN");
  for (size_t i = 0; i < shapes_.size(); ++i) {
    const Product& p = shapes_[i];
    double t = time_call([&] { prepared_[i].run(); }, kSamples, 0.002).median;
    std::string extents;
    for (auto& l : p.batch) extents += fmt::format("{} x ", l.extent);
    extents += fmt::format("{} x {} x {}{}", p.m.extent, p.n.extent, p.k.extent,
                           p.plain ? "" : " (copied)");
    fmt::print("{:>5} {:>10.1f} {:>8.1f}  {:<22} {:<34} {}\n", calls_[i], t * 1e6,
               p.flops() / t * 1e-9, p.spec, extents, prepared_[i].implementation());
  }
}

}  // namespace tessera::bench
