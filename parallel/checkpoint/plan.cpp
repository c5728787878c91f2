#include "parallel/checkpoint/plan.h"

#include <algorithm>
#include <map>
#include <set>

namespace tessera::checkpoint {
namespace {

using io::quote;

struct Described {
  std::string name;
  DType dtype;
  Shape global;
  Box box;
};

Dims get_dims(Unpacker& in) {
  Dims out;
  for (auto n = in.get<uint8_t>(); n > 0; --n) out.push_back(in.get<int64_t>());
  return out;
}
void put_dims(Packer& out, const Dims& d) {
  out.put(uint8_t(d.size()));
  for (int64_t x : d) out.put(x);
}

std::vector<Described> parse(const std::string& description) {
  Unpacker in(description);
  std::vector<Described> out;
  while (!in.done()) {
    Described d{.name = in.get_text(), .dtype = in.get<DType>(), .global = {}, .box = {}};
    d.global = get_dims(in);
    d.box.begin = get_dims(in);
    d.box.shape = get_dims(in);
    out.push_back(std::move(d));
  }
  return out;
}

struct Holder {
  int rank;
  size_t piece;
};
// One box of one tensor, and the ranks that hold it.
struct Job {
  const TensorEntry* tensor;
  Box box;
  std::vector<Holder> holders;
  uint64_t bytes;
};

struct Less {
  bool operator()(const Box& a, const Box& b) const {
    auto key = [](const Box& x) {
      return std::pair<std::span<const int64_t>, std::span<const int64_t>>(x.begin, x.shape);
    };
    auto [ab, as] = key(a);
    auto [bb, bs] = key(b);
    if (!std::ranges::equal(ab, bb)) return std::ranges::lexicographical_compare(ab, bb);
    return std::ranges::lexicographical_compare(as, bs);
  }
};

struct Collected {
  TensorEntry entry;
  int first_rank;
  std::map<Box, std::vector<Holder>, Less> boxes;
};

std::map<std::string, Collected> collect(const std::vector<std::string>& descriptions) {
  std::map<std::string, Collected> out;
  for (int rank = 0; rank < int(descriptions.size()); ++rank) {
    std::vector<Described> pieces = parse(descriptions[size_t(rank)]);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Described& d = pieces[i];
      auto [at, fresh] = out.try_emplace(d.name);
      Collected& c = at->second;
      if (fresh) c.entry = {d.name, d.dtype, d.global, {}}, c.first_rank = rank;
      TESSERA_CHECK(c.entry.dtype == d.dtype && c.entry.shape == d.global,
                    "checkpoint: tensor {} is {}{} on rank {} and {}{} on rank {}; all ranks "
                    "describe the same global tensor",
                    quote(d.name), name_of(c.entry.dtype), to_string(c.entry.shape), c.first_rank,
                    name_of(d.dtype), to_string(d.global), rank);
      if (numel(d.box.shape) == 0) continue;
      auto& holders = c.boxes[d.box];
      TESSERA_CHECK(holders.empty() || holders.back().rank != rank,
                    "checkpoint: tensor {}: rank {} gives the box {} twice", quote(d.name), rank,
                    to_string(d.box));
      holders.push_back({rank, i});
    }
  }
  for (const auto& [name, c] : out) {
    std::vector<Box> boxes;
    for (const auto& [box, holders] : c.boxes) boxes.push_back(box);
    if (auto error = partition_error(c.entry.shape, std::move(boxes)))
      throw UserError(
          fmt::format("checkpoint: tensor {} {}: {}; the pieces of all ranks together "
                      "must hold each element once",
                      quote(name), to_string(c.entry.shape), *error));
  }
  return out;
}

// Assigns boxes to ranks: [rank] -> the pieces it writes.
std::vector<std::vector<size_t>> deal(const std::map<std::string, Collected>& tensors, int ranks) {
  std::vector<Job> jobs;
  for (const auto& [name, c] : tensors)
    for (const auto& [box, holders] : c.boxes)
      jobs.push_back({&c.entry, box, holders, uint64_t(numel(box.shape)) * size_of(c.entry.dtype)});
  std::ranges::stable_sort(jobs, std::greater{}, &Job::bytes);
  std::vector<uint64_t> load(size_t(ranks), 0);
  std::vector<std::vector<size_t>> out(static_cast<size_t>(ranks));
  // Boxes with one holder leave no choice, so they are assigned before the others.
  for (bool replicated : {false, true})
    for (const Job& job : jobs) {
      if ((job.holders.size() > 1) != replicated) continue;
      const Holder& to = *std::ranges::min_element(
          job.holders, {}, [&](const Holder& h) { return load[size_t(h.rank)]; });
      load[size_t(to.rank)] += job.bytes;
      out[size_t(to.rank)].push_back(to.piece);
    }
  return out;
}

}  // namespace

std::string describe_pieces(std::span<const Piece> pieces) {
  Packer out;
  for (const Piece& p : pieces) {
    TESSERA_CHECK(!p.name.empty() && p.name.size() <= io::kMaxNameBytes,
                  "checkpoint: the name {} must have 1 to {} bytes", quote(p.name),
                  io::kMaxNameBytes);
    TESSERA_CHECK(p.values.defined(),
                  "checkpoint: piece {} has no values; leave it out or initialise it",
                  quote(p.name));
    TESSERA_CHECK(!p.values.device().is_meta() && !(p.values.layers() & bit(Layer::kSharding)),
                  "checkpoint: piece {} ({}) is not a plain tensor with values; pass the part this "
                  "rank holds",
                  quote(p.name), tessera::describe(p.values));
    TESSERA_CHECK(inside(p.box(), p.global),
                  "checkpoint: piece {}: the box at {} of shape {} is not inside {}", quote(p.name),
                  to_string(p.begin), to_string(p.values.shape()), to_string(p.global));
    out.put(p.name);
    out.put(p.values.dtype());
    put_dims(out, p.global);
    put_dims(out, p.begin);
    put_dims(out, p.values.shape());
  }
  return out.take();
}

Plan make_plan(Exchange& exchange, std::string description, std::span<const Piece> pieces) {
  std::vector<std::string> all = exchange.gather(description);
  Plan plan;
  std::vector<std::string> parts;
  exchange.together([&] {
    if (exchange.rank() != 0) return;
    std::map<std::string, Collected> tensors = collect(all);
    for (const std::vector<size_t>& part : deal(tensors, exchange.size())) {
      Packer out;
      for (size_t i : part) out.put(i);
      parts.push_back(out.take());
    }
    for (auto& [name, c] : tensors) plan.tensors.push_back(std::move(c.entry));
  });
  std::string mine = exchange.scatter(parts);
  for (Unpacker in(mine); !in.done();) plan.mine.push_back(in.get<size_t>());
  // Wide elements come first: the header is padded to 8 bytes, so every tensor in the file is
  // aligned.
  std::ranges::sort(plan.mine, [&](size_t a, size_t b) {
    const Piece &x = pieces[a], &y = pieces[b];
    size_t wx = size_of(x.values.dtype()), wy = size_of(y.values.dtype());
    if (wx != wy) return wx > wy;
    return x.name != y.name ? x.name < y.name : Less()(x.box(), y.box());
  });
  for (size_t i : plan.mine) plan.bytes += pieces[i].values.nbytes();
  plan.description = std::move(description);
  return plan;
}

}  // namespace tessera::checkpoint
