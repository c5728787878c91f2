#include "parallel/checkpoint/load.h"

#include <algorithm>
#include <set>

#include "core/autograd/autograd.h"
#include "core/ops/update.h"
#include "parallel/checkpoint/exchange.h"
#include "parallel/checkpoint/reader.h"

namespace tessera::checkpoint {
namespace {

using io::quote;

void check_piece(const std::string& folder, const Piece& p, const TensorEntry& t) {
  TESSERA_CHECK(p.values.dtype() == t.dtype && p.global == t.shape,
                "checkpoint: {}: tensor {} is {}{}, but {}{} is asked for", quote(folder),
                quote(p.name), name_of(t.dtype), to_string(t.shape), name_of(p.values.dtype()),
                to_string(p.global));
}

void check_destination(const Piece& p) {
  TESSERA_CHECK(p.values.defined() && !p.values.device().is_meta() &&
                    !(p.values.layers() & bit(Layer::kSharding)),
                "checkpoint: the destination of {} is not a plain tensor with values",
                quote(p.name));
  TESSERA_CHECK(inside(p.box(), p.global),
                "checkpoint: the destination of {}: the box at {} of shape {} is not inside {}",
                quote(p.name), to_string(p.begin), to_string(p.values.shape()),
                to_string(p.global));
}

void fill_piece(Reader& reader, const Piece& p, const TensorEntry& t) {
  // The other ranks bump it when they fill their pieces.
  if (p.values.numel() == 0) return p.values.storage()->bump_version();
  NoGrad off;
  Tensor to = p.values.detach();
  if (!to.is_contiguous() || !to.storage()->host_addressable()) {
    Tensor dense = empty(to.shape(), to.dtype());
    reader.fill(t, p.box(), static_cast<std::byte*>(dense.raw()));
    assign_(to, dense);
    return;
  }
  reader.fill(t, p.box(), static_cast<std::byte*>(to.raw()));
  to.storage()->bump_version();
}

std::string join(const std::set<std::string>& names) {
  Packer out;
  for (const std::string& n : names) out.put(n);
  return out.take();
}
std::set<std::string> parse_names(const std::string& text) {
  std::set<std::string> out;
  for (Unpacker in(text); !in.done();) out.insert(in.get_text());
  return out;
}

std::string some(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < 10; ++i) out += (i ? ", " : "") + quote(names[i]);
  return names.size() > 10 ? fmt::format("{} and {} more", out, names.size() - 10) : out;
}

// Compares names over all ranks: a single rank may ask for no part of a tensor.
void compare_names(Exchange& x, const Manifest& m, std::span<const Piece> pieces,
                   const LoadOptions& o, Loaded& out) {
  std::set<std::string> mine;
  for (const Piece& p : pieces)
    if (matches(o.only, p.name)) mine.insert(p.name);
  std::set<std::string> all;
  for (const std::string& text : x.gather(join(mine))) all.merge(parse_names(text));
  all = parse_names(x.broadcast(join(all)));
  for (const std::string& name : all)
    if (!m.find(name)) out.missing.push_back(name);
  for (const TensorEntry& t : m.tensors)
    if (matches(o.only, t.name) && !all.contains(t.name)) out.unexpected.push_back(t.name);
  if (!o.strict || (out.missing.empty() && out.unexpected.empty())) return;
  std::string text = fmt::format("checkpoint: {} does not fit", quote(out.folder));
  if (!out.missing.empty()) text += "; it lacks " + some(out.missing);
  if (!out.unexpected.empty()) text += "; nobody asked for its " + some(out.unexpected);
  throw UserError(text + "; load a part of the names (only) or not strictly");
}

}  // namespace

Loaded load(const std::string& path, std::span<const Piece> pieces, ProcessGroup* group,
            const LoadOptions& o) {
  if (!group) group = &world();
  Exchange x(group->size() > 1 ? group : nullptr, o.timeout, "loading " + quote(path));
  Loaded out;
  x.together([&] {
    if (x.rank() != 0) return;
    Newest found = resolve(path);
    out.folder = found.folder, out.warning = found.warning;
  });
  out.folder = x.broadcast(out.folder);
  Manifest m;
  x.together([&] {
    m = read_step(out.folder);
    for (const Piece& p : pieces) check_destination(p);
  });
  out.step = m.step;
  out.extra = m.extra;
  if (o.accept) x.together([&] { o.accept(out); });
  compare_names(x, m, pieces, o, out);
  x.together([&] {
    for (const Piece& p : pieces)
      if (const TensorEntry* t = matches(o.only, p.name) ? m.find(p.name) : nullptr)
        check_piece(out.folder, p, *t);
    Reader reader(out.folder, m);
    for (const Piece& p : pieces)
      if (const TensorEntry* t = matches(o.only, p.name) ? m.find(p.name) : nullptr)
        fill_piece(reader, p, *t);
    out.read = reader.cost();
  });
  return out;
}

std::optional<Newest> newest(const std::string& folder, ProcessGroup& group) {
  Exchange x(group.size() > 1 ? &group : nullptr, {}, "looking into " + quote(folder));
  std::string text;
  x.together([&] {
    auto found = x.rank() == 0 ? newest(folder) : std::nullopt;
    if (!found) return;
    Packer out;
    out.put(found->step);
    out.put(found->folder);
    out.put(found->warning);
    text = out.take();
  });
  text = x.broadcast(text);
  if (text.empty()) return std::nullopt;
  Unpacker in(text);
  auto step = in.get<int64_t>();
  std::string where = in.get_text();
  return Newest{step, where, in.get_text()};
}

}  // namespace tessera::checkpoint
