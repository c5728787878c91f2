#include "launcher/agents/generation.h"

#include <fmt/core.h>

#include "collectives/store/wire.h"

namespace tessera::launcher {
namespace {

using wire::Reader;
using wire::Writer;

void put(Writer& out, const Ballot& b) { out.integer(int64_t(b.round)).integer(int64_t(b.by)); }

void put(Writer& out, const Node& n) {
  out.integer(int64_t(n.id))

      .integer(n.slot)
      .integer(n.nproc)
      .text(n.host);
  out.count(n.addresses.size());
  for (const Address& a : n.addresses) out.text(a.host).integer(a.port);
  out.integer(n.store_port).text(n.job);
}

void put(Writer& out, const Generation& g) {
  put(out, g.ballot);
  out.text(g.run).integer(g.restarts).integer(int64_t(g.number)).count(g.nodes.size());
  for (const Node& n : g.nodes) put(out, n);
}

// A list whose items take at least `least` bytes each, so that a count that was made up cannot ask
// for more memory than the message has bytes.
template <class Get>
auto list_of(Reader& in, size_t least, Get get) {
  const size_t n = in.count();
  in.expect(n, least);
  std::vector<decltype(get(in))> items;
  items.reserve(n);
  for (size_t i = 0; i < n; ++i) items.push_back(get(in));
  return items;
}

int small(Reader& in, int low, int high) {
  const int64_t v = in.integer();
  if (v < low || v > high) throw wire::BadFrame("a number outside its range");
  return int(v);
}

constexpr int kMostRanks = 1 << 20;

Ballot ballot(Reader& in) {
  const auto round = uint64_t(in.integer());
  return {round, NodeId(in.integer())};
}

Address address(Reader& in) {
  std::string host = in.text();
  return {std::move(host), small(in, 0, 65535)};
}

Node node(Reader& in) {
  Node n;
  n.id = NodeId(in.integer());
  n.slot = small(in, -1, kMostRanks);
  n.nproc = small(in, 1, kMostRanks);
  n.host = in.text();
  n.addresses = list_of(in, 12, address);
  n.store_port = small(in, 0, 65535);
  n.job = in.text();
  return n;
}

Generation generation(Reader& in) {
  Generation g;
  g.ballot = ballot(in);
  g.run = in.text();
  g.restarts = small(in, 0, 1 << 30);
  g.number = uint64_t(in.integer());
  g.nodes = list_of(in, 44, node);
  return g;
}

}  // namespace

std::string name_of(const Node& n) {
  return n.slot < 0 ? n.host : fmt::format("node {} ({})", n.slot, n.host);
}

int Generation::place_of(NodeId id) const {
  for (size_t i = 0; i < nodes.size(); ++i)
    if (nodes[i].id == id) return int(i);
  return -1;
}

const Node& Generation::leader() const { return nodes[size_t(place_of(ballot.by))]; }

int Generation::world_size() const { return first_rank(int(nodes.size())); }

int Generation::first_rank(int place) const {
  int rank = 0;
  for (int i = 0; i < place; ++i) rank += nodes[size_t(i)].nproc;
  return rank;
}

std::string encode(const Message& m) {
  Writer out(m.kind);
  put(out, m.ballot);
  put(out, m.promised);
  put(out, m.node);
  out.count(m.known.size());
  for (const Generation& g : m.known) put(out, g);
  put(out, m.proposal);
  out.count(m.covers.size());
  for (const Ballot& b : m.covers) put(out, b);
  out.integer(m.sure).text(m.text);
  return out.body();
}

Message decode(std::string_view bytes) {
  Reader in(bytes);
  Message m;
  const uint8_t kind = in.code();
  if (kind > uint8_t(MessageKind::kPayload)) throw wire::BadFrame("unknown kind of message");
  m.kind = MessageKind(kind);
  m.ballot = ballot(in);
  m.promised = ballot(in);
  m.node = node(in);
  m.known = list_of(in, 40, generation);
  m.proposal = generation(in);
  m.covers = list_of(in, 16, ballot);
  m.sure = small(in, 0, 1);
  m.text = in.text();
  in.finish();
  return m;
}

}  // namespace tessera::launcher
