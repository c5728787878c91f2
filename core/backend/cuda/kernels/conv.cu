// Convolutions as a gather and a product: `gather` writes what each place of the output reads, a
// row of [places of the kernel x channels of a group], for matmul.cu; `collect` is its transpose,
// for the gradient of the input. Channels are neighbours, so packs of them are moved together.
// After convert.h and device.h. Invariant: a gradient is added up by its owner, places of the
// kernel in their order.
namespace tessera::device {

/// Column (k0, k1, k2, ci) of a row (image, o0, o1, o2) of one group.
struct ConvColumn {
  unsigned channel, k[3];
};
TESSERA_FN ConvColumn column_of(const ConvCall& c, unsigned column) {
  ConvColumn q;
  q.channel = column % c.channels, column /= c.channels;
#pragma unroll
  for (int d = 2; d >= 0; --d) {
    const unsigned extent = unsigned(c.dim[d].kernel);
    q.k[d] = column % extent, column /= extent;
  }
  return q;
}

/// columns [groups, rows, kernel x channels] of x, kWidth channels at once; zeros outside of it.
/// Rows [first, first + rows).
template <class T, int kWidth>
TESSERA_FN void gather_columns(const ConvCall& c) {
  const unsigned thread = blockIdx.x * 256 + threadIdx.x, e = thread * kWidth;
  if (thread >= c.count / kWidth) return;
  const ConvColumn q = column_of(c, e % c.columns);
  unsigned rest = e / c.columns;
  const unsigned row = rest % c.rows, group = rest / c.rows;
  unsigned place = c.first + row;
  long offset = (long(group) * c.channels + q.channel) * c.x.channel;
  bool there = true;
#pragma unroll
  for (int d = 2; d >= 0; --d) {
    const PoolDim& p = c.dim[d];
    const long o = place % unsigned(p.out),
               i = o * p.stride - p.padding + long(q.k[d]) * p.dilation;
    place /= unsigned(p.out);
    there = there && i >= 0 && i < p.in;
    offset += i * c.x.dim[d];
  }
  Pack<T, kWidth> value = {};
  if (there) value = load<kWidth>(static_cast<const T*>(c.in) + offset + place * c.x.image);
  store(static_cast<T*>(c.out) + e, value);
}

/// dx [images, groups x channels, spatial] from the cotangents of all columns.
template <class T>
TESSERA_FN void collect_columns(const ConvCall& c) {
  const unsigned e = blockIdx.x * 256 + threadIdx.x;
  if (e >= c.count) return;
  const unsigned all = c.groups * c.channels, channel = e % all;
  unsigned rest = e / all;
  int i[3];
  long to = long(channel) * c.x.channel;
#pragma unroll
  for (int d = 2; d >= 0; --d) {
    i[d] = int(rest % unsigned(c.dim[d].in)), rest /= unsigned(c.dim[d].in);
    to += i[d] * c.x.dim[d];
  }
  to += long(rest) * c.x.image;
  const unsigned group = channel / c.channels, ci = channel % c.channels;
  const T* columns = static_cast<const T*>(c.in) + long(group) * c.rows * c.columns;
  Compute<T> sum = 0;
  // Place o of the output reads place i through k where o stride = i + padding - k dilation.
  auto reads = [&](int d, int k, int& o) {
    const PoolDim& p = c.dim[d];
    const int at = i[d] + p.padding - k * p.dilation;
    o = at / p.stride;
    return at >= 0 && at % p.stride == 0 && o < p.out;
  };
  for (int a = 0; a < c.dim[0].kernel; ++a) {
    int o0, o1, o2;
    if (!reads(0, a, o0)) continue;
    for (int b = 0; b < c.dim[1].kernel; ++b) {
      if (!reads(1, b, o1)) continue;
      for (int k = 0; k < c.dim[2].kernel; ++k) {
        if (!reads(2, k, o2)) continue;
        const long row = ((long(rest) * c.dim[0].out + o0) * c.dim[1].out + o1) * c.dim[2].out + o2;
        const long column = long((a * c.dim[1].kernel + b) * c.dim[2].kernel + k) * c.channels + ci;
        sum += widen(columns[row * c.columns + column]);
      }
    }
  }
  static_cast<T*>(c.out)[to] = Narrow<T>::from(sum);
}

}  // namespace tessera::device

// instances: T
KERNEL(gather, ConvCall, 256) { gather_columns<T, 1>(c); }
KERNEL(gather_packs, ConvCall, 256) { gather_columns<T, kPack<T>>(c); }
KERNEL(collect, ConvCall, 256, 2) { collect_columns<T>(c); }
