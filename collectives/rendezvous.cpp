#include "collectives/rendezvous.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "collectives/backend_name.h"
#include "collectives/device_group.h"
#include "collectives/gloo/transport.h"
#include "collectives/messages/hierarchical.h"
#include "collectives/mpi/transport.h"
#include "collectives/rendezvous_store.h"
#include "collectives/shm/process.h"
#include "collectives/store/liveness.h"
#include "collectives/store/route.h"
#include "core/base/env.h"
#if TESSERA_HAVE_CUDA
#include "collectives/nccl/join.h"
#endif

namespace tessera::detail {
namespace {

using Clock = std::chrono::steady_clock;

Segment::Options segment_options(int size) {
  Segment::Options o;
  // Mailboxes are quadratic in the number of ranks, but their memory is only touched when used.
  if (size > 8) o.mail_bytes = size_t{8} << 10;
  return o;
}

/// The record that one rank writes to the store, one field a line.
struct Record {
  std::string machine;  // ranks with the same value share a loopback interface
  // Ranks with the same value share memory (TESSERA_HOST_ID can divide a machine).
  std::string host;
  std::string backend;  // the backend that it asks for
  std::string address;  // of the group's memory; only rank 0's is set
  std::string master;   // the address by which this rank reaches MASTER_ADDR; "": it does not
  std::string text() const {
    return fmt::format("{}\n{}\n{}\n{}\n{}", machine, host, backend, address, master);
  }
};
Record parse_record(const std::string& text) {
  std::vector<std::string> lines{""};
  for (char c : text)
    if (c == '\n')
      lines.emplace_back();
    else
      lines.back() += c;
  TESSERA_CHECK(lines.size() == 5,
                "init_process_group: a rank's record is \"{}\"; is the store used by two jobs?",
                text.substr(0, 100));
  return {lines[0], lines[1], lines[2], lines[3], lines[4]};
}
bool all_share(std::span<const Record> records, std::string Record::*line) {
  return std::ranges::all_of(records, [&](const Record& r) { return r.*line == records[0].*line; });
}

std::vector<Record> exchange(Store& store, const Membership& m, const std::string& prefix,
                             const Record& mine, Millis timeout) {
  std::vector<std::string> keys;
  for (int r = 0; r < m.size; ++r) keys.push_back(fmt::format("{}{}", prefix, r));
  store.set(keys[size_t(m.rank)], mine.text());
  const std::vector<std::string> texts = store.multi_get(keys, timeout);
  std::vector<Record> records;
  for (const std::string& t : texts) records.push_back(parse_record(t));
  return records;
}

// Where this rank listens for its peers: on the way to MASTER_ADDR. On the master's own host its
// name may be one of loopback (Debian's /etc/hosts has 127.0.1.1 for it); ranks elsewhere know
// better.
std::string address_for(const std::vector<Record>& records, const std::string& master,
                        const Route& route) {
  if (all_share(records, &Record::machine)) return "127.0.0.1";
  TESSERA_CHECK(route.error.empty(), "MASTER_ADDR={}: {}", master, route.error);
  if (!is_loopback(route.here)) return route.here;
  for (const Record& r : records)
    if (!r.master.empty() && !is_loopback(r.master)) return r.master;
  detail::raise<UserError>(
      fmt::format("MASTER_ADDR={}: is a loopback address, but ranks are on several hosts; use the "
                  "first host's name or address",
                  master));
}

Millis in_millis(double seconds) { return Millis(int64_t(std::ceil(seconds * 1000))); }

int block_size(const std::vector<Record>& records) {
  std::vector<std::string> hosts;
  for (const Record& r : records) hosts.push_back(r.host);
  return block_of_hosts(hosts);
}

HostNames host_names(const std::vector<Record>& records) {
  if (all_share(records, &Record::machine)) return nullptr;
  std::vector<std::string> names;  // a machine's identity begins with its name
  for (const Record& r : records) names.push_back(r.machine.substr(0, r.machine.find(' ')));
  return std::make_shared<const std::vector<std::string>>(std::move(names));
}

std::string agree_on_backend(const std::vector<Record>& records) {
  for (size_t r = 1; r < records.size(); ++r)
    TESSERA_CHECK(records[r].backend == records[0].backend,
                  "init_process_group: rank 0 asks for backend \"{}\", rank {} for \"{}\"; set "
                  "TESSERA_BACKEND alike everywhere",
                  records[0].backend, r, records[r].backend);
  const bool one_host = all_share(records, &Record::host);
  const std::string& asked = records[0].backend;
  TESSERA_CHECK(asked != kShm || one_host,
                "init_process_group: backend shm, but ranks are on different hosts or in different "
                "containers; unset TESSERA_BACKEND");
  if (!asked.empty()) return asked;
  return std::string(one_host ? kShm : block_size(records) > 1 ? kBlocks : kGloo);
}

// Waits until all ranks have attached `segment`. A rank that has seen this may end at once, so the
// end of a rank only counts if not all have attached when it becomes known.
void await_all(Segment& segment, RendezvousStore& store, const Membership& m, Millis timeout,
               Watchdog* dog) {
  auto all = [&] { return segment.attached().load(std::memory_order_acquire) >= uint32_t(m.size); };
  auto absent = [&] {
    std::vector<int> ranks;
    for (int r = 0; r < m.size; ++r)
      if (segment.state(r).pid == 0) ranks.push_back(r);
    return ranks;
  };
  if (all()) return;
  RendezvousWait wait(m, timeout, absent(), dog);
  for (auto look = Clock::now() + RendezvousStore::kCheckInterval; !all();) {
    if (Clock::now() > look) {
      try {
        store.check_members();
        wait.check(absent());
      } catch (const CommError&) {
        if (!all()) throw;
      }
      look = Clock::now() + RendezvousStore::kCheckInterval;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

std::unique_ptr<Engine> connect(Membership m, const JoinOptions& o, const std::string& prefix) {
  Segment::Options layout = segment_options(m.size);
  std::shared_ptr<Segment> segment;
  const std::string id = o.host.empty() ? env::get("TESSERA_HOST_ID") : o.host;
  TESSERA_CHECK(id.find('\n') == std::string::npos, "TESSERA_HOST_ID=\"{}\": expected one line",
                id.substr(0, 100));
  const std::string machine = host_identity();
  static const std::string master = env::get("MASTER_ADDR", "127.0.0.1");
  static const Route route = route_to(master);  // it may ask a name server, once
  Record mine{machine, fmt::format("{} {}", machine, id), o.backend, "", route.there};
  if (m.rank == 0 && (o.backend.empty() || o.backend == kShm)) {
    segment = Segment::make_shared(m.size, layout);
    mine.address = segment->address();
  }
  auto store = std::make_shared<RendezvousStore>(m, o.store, prefix, o.watchdog);
  auto records = exchange(*store, m, prefix, mine, o.join_timeout);
  std::string backend = agree_on_backend(records);
  m.hosts = host_names(records);
  if (backend != kShm) {
    auto transport =
        backend == kMpi ? make_mpi_transport(
                              m, {.store = store, .prefix = prefix, .join_timeout = o.join_timeout})
                        : make_gloo_transport(m, {.store = store,
                                                  .prefix = prefix,
                                                  .address = address_for(records, master, route),
                                                  .timeout = o.timeout,
                                                  .join_timeout = o.join_timeout});
    std::unique_ptr<Engine> engine;
    if (backend == kBlocks) {
      const int B = block_size(records);
      const Membership members = block_of(m, B);
      JoinOptions in_block = o;
      in_block.backend = kShm;
      engine = std::make_unique<HierarchicalEngine>(
          m, std::move(transport), o.watchdog, o.store, prefix, B,
          connect(members, in_block, fmt::format("{}block{}/", prefix, members.first)));
    } else {
      engine =
          std::make_unique<MessageEngine>(m, std::move(transport), o.watchdog, o.store, prefix);
    }
    store->joined();
    return engine;
  }
  try {
    if (!segment) segment = Segment::attach(records[0].address, m.size, layout);
  } catch (const Error&) {
    store->explain();
    throw;
  }
  auto engine = std::make_unique<ShmEngine>(m, segment,
                                            ShmOptions{.processes = true, .watchdog = o.watchdog});
  // The others attach through the creator's descriptor, so it stays open until they have.
  await_all(*segment, *store, m, o.join_timeout, o.watchdog.get());
  segment->close_descriptor();
  o.store->delete_key(fmt::format("{}{}", prefix, m.rank));
  return engine;
}

Ref<ProcessGroup> as_device_group(Membership m, std::unique_ptr<Engine> engine, Millis timeout,
                                  BackendGroup::Splitter splitter,
                                  std::shared_ptr<Watchdog> watchdog,
                                  [[maybe_unused]] std::shared_ptr<Store> store,
                                  [[maybe_unused]] std::string prefix,
                                  DeviceGroup::PublishCause publish_cause = nullptr) {
  DeviceGroup::MakeCards make_cards;
#if TESSERA_HAVE_CUDA
  if (watchdog && store)
    make_cards = [context =
                      nccl::GroupContext{watchdog, std::move(store), std::move(prefix), timeout}](
                     ProcessGroup& cpu, Device device) { return nccl::join(cpu, device, context); };
#endif
  DeviceGroup::ByKind groups;
  groups[size_t(DeviceKind::kCPU)] = Ref<ProcessGroup>(new BackendGroup(
      std::move(m), std::move(engine), timeout, std::move(splitter), std::move(watchdog)));
  return make_ref<DeviceGroup>(std::move(groups), std::move(publish_cause), std::move(make_cards));
}

}  // namespace

Ref<ProcessGroup> join_by_store(Membership members, const JoinOptions& o) {
  JoinOptions options = o;
  if (options.store && !options.watchdog)
    options.watchdog = std::make_shared<Watchdog>(
        members.world_ranks[size_t(members.rank)], std::ranges::max(members.world_ranks) + 1,
        options.store, options.prefix, options.store_keeper);
  auto splitter = [options](const Membership& sub, uint64_t) {
    JoinOptions o = options;
    o.join_timeout = o.timeout;
    try {
      return connect(sub, o, fmt::format("{}{}/", o.prefix, sub.group));
    } catch (const CommError& e) {
      options.watchdog->failed(e);
      throw;
    }
  };
  DeviceGroup::PublishCause publish_cause;
  if (options.store)
    publish_cause = [store = options.store](std::span<const int> ranks) {
      const StoreTimeLimit limit(Watchdog::kResponseTime);
      try {
        announce_cause(*store, ranks);
      } catch (const Error&) {  // no rank is left to ask, the store is full, or out of reach
      }
    };
  std::unique_ptr<Engine> engine;
  try {
    engine = members.size == 1 ? make_solo_engine()
                               : connect(members, options, options.prefix + members.group + "/");
  } catch (const CommError& e) {  // without a group there is nothing to abort
    if (options.watchdog) options.watchdog->failed(e);
    if (publish_cause && !e.culprits().empty()) publish_cause(e.culprits());
    throw;
  }
  return as_device_group(std::move(members), std::move(engine), options.timeout, splitter,
                         options.watchdog, options.store, options.prefix, std::move(publish_cause));
}

Ref<ProcessGroup> join_threads(Membership members, std::shared_ptr<Hub> hub, Millis timeout,
                               ShmOptions options) {
  if (!options.watchdog)
    options.watchdog =
        std::make_shared<Watchdog>(members.rank, members.size, hub->store(), "ranks/");
  auto connect = [hub, options](const Membership& m, uint64_t) -> std::unique_ptr<Engine> {
    if (m.size == 1) return make_solo_engine();
    auto segment = hub->join(m.group, m.size, segment_options(m.size));
    return std::make_unique<ShmEngine>(m, std::move(segment), options);
  };
  auto engine = connect(members, 0);
  return as_device_group(std::move(members), std::move(engine), timeout, connect, options.watchdog,
                         hub->store(), "ranks/");
}

Membership make_world(const std::string& name, int rank, int size) {
  Membership m{.group = name, .rank = rank, .size = size, .world_ranks = {}};
  for (int r = 0; r < size; ++r) m.world_ranks.push_back(r);
  return m;
}

Millis default_timeout() { return in_millis(env::get_seconds("TESSERA_TIMEOUT", 60)); }
Millis join_timeout() { return in_millis(env::get_seconds("TESSERA_JOIN_TIMEOUT", 600)); }

}  // namespace tessera::detail
