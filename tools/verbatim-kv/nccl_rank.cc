#include "verbatim-kv/nccl_rank.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "memory/gpu.h"
#include "ncclapi/nccl.h"
#include "ncclapi/nccl_puts.h"
#include "ranks/plugin_counters.h"
#include "ranks/progress_bar.h"
#include "verbatim-kv/agreement.h"
#include "verbatim-kv/channel.h"
#include "verbatim-kv/request_batches.h"
#include "workload/kv/block_pool.h"
#include "workload/kv/crc32.h"

namespace verbatim::kv {
namespace {

using memory::Gpu;
using ncclapi::Nccl;
using ncclapi::NcclPuts;

constexpr std::size_t kGuard = memory::GuardedBuffer::kGuardBytes;

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string(name) + " unset" : std::string(name) + "=" + value;
}

// The state of one family on this rank. Families share nothing.
struct Side {
  Side(memory::Memory& host, const Family& own, std::size_t reserved, double fragmentation, std::uint64_t seed,
       const std::vector<Fault>& all)
      : family(own),
        contents(host, own),
        faults(all, own.geometry.family),
        pool(own.num_blocks, reserved, fragmentation, seed) {}

  const Family& family;
  const Contents contents;
  const Faults faults;
  BlockPool pool;
  Nccl::Comm comm = nullptr;
  Gpu::Stream stream = nullptr;
  std::byte* staging = nullptr;                                     // of --mode nccl
  NcclPuts::Window window = nullptr;                                // of --mode nccl-put: the slab of every rank
  std::vector<FamilyDescription> peers = {};                        // by rank
  std::map<std::uint32_t, std::vector<std::uint32_t>> blocks = {};  // of the batch's requests, by request
  FamilyStats stats = {};
};

// One rank's part of a request, which is one NCCL message.
struct Part {
  const Request* request;
  int peer;
  std::uint32_t decode;  // index of the decode rank
  BlockList source;
  BlockList destination;
  std::size_t staged_at = 0;  // offset in the staging buffer
};

class NcclRank final : public ranks::Rank {
 public:
  NcclRank(const Options& options, ranks::CoordinatorConnection& coordinator)
      : options_(options),
        coordinator_(coordinator),
        requests_(make_requests(options_)),
        is_prefill_(options_.job.rank < options_.prefills),
        index_(static_cast<std::uint32_t>(is_prefill_ ? options_.job.rank : options_.job.rank - options_.prefills)),
        layout_(lay_out(options_, requests_, is_prefill_)),
        memory_(*host_memory_, layout_.families, Allocations::kSlab),
        batches_(make_batches(options_, requests_, layout_)),
        gpu_(options_.cuda, options_.job.rank),
        slab_stream_(gpu_.make_stream()),
        nccl_(options_.nccl) {
    if (options.mode == Mode::kNcclPut) puts_.emplace(options.nccl);
  }

  ExitStatus run() override {
    agree(coordinator_, options_, requests_);
    make_sides();
    exchange_families();
    ranks::ProgressBar bar(options_.job.rank == 0);
    std::size_t done = 0;
    for (const RequestBatch& batch : batches_) {
      run_batch(batch);
      done += batch.size();
      bar.draw(static_cast<double>(done) / static_cast<double>(requests_.size()),
               std::to_string(done) + " of " + std::to_string(requests_.size()) + " requests");
    }
    bar.clear();
    close();
    return report();
  }

 private:
  void make_sides() {
    // Different host ids make NCCL use the network between ranks of one machine, even on the same GPU.
    ::setenv("NCCL_HOSTID", ("verbatim-kv-" + std::to_string(options_.job.rank)).c_str(), 0);
    const Interval slab = memory_.intervals().all().front();
    host_ = reinterpret_cast<std::byte*>(slab.begin) - kGuard;
    bytes_ = slab.end - slab.begin + 2 * kGuard;
    device_ = puts_ ? puts_->allocate(bytes_) : gpu_.allocate(bytes_);
    sides_.reserve(layout_.families.size());
    for (std::size_t i = 0; i < layout_.families.size(); ++i) {
      const Family& family = layout_.families[i];
      Side& side = sides_.emplace_back(
          *host_memory_, family, is_prefill_ ? 0 : layout_.reserved[i], options_.fragmentation,
          options_.requests.seed * 7919 + std::uint64_t{index_} * 4 + i + (is_prefill_ ? 2 : 0), options_.faults);
      Nccl::UniqueId id{};
      if (options_.job.rank == 0) id = nccl_.make_id();
      id = coordinator_.all_gather_values(id).front();
      side.comm = nccl_.init(options_.job.nranks, id, options_.job.rank);
      side.stream = gpu_.make_stream();
      if (puts_) {
        side.window = puts_->add_window(side.comm, device_, bytes_);
      } else {
        side.staging = gpu_.allocate(staging_bytes(family.geometry));
      }
      side.stats.connections = 1;
      std::vector<std::uint32_t> all(family.num_blocks);
      std::iota(all.begin(), all.end(), 0U);
      if (options_.check) side.contents.set_canaries(all);
    }
    if (options_.check) gpu_.upload(device_, host_, bytes_, slab_stream_);
  }

  void close() {
    for (Side& side : sides_) {
      if (puts_) puts_->remove_window(side.comm, side.window);
      nccl_.destroy(side.comm);
    }
    if (puts_) puts_->free(device_);
  }

  // The staging bytes that the largest batch needs on this rank.
  std::size_t staging_bytes(const Geometry& geometry) const {
    std::size_t most = 0;
    for (const RequestBatch& batch : batches_) {
      std::size_t blocks = 0;
      for (const Request* const request : batch) {
        if (!is_own(*request)) continue;
        blocks += request->blocks(geometry.block_tokens) - request->hit_blocks(geometry.block_tokens);
      }
      most = std::max(most, blocks);
    }
    return most * geometry.layers * geometry.entries * geometry.part_bytes() * (is_prefill_ ? geometry.tp_ratio : 1);
  }

  // Exchanges the families of all ranks and checks that their geometries are equal.
  void exchange_families() {
    Writer writer;
    for (const Side& side : sides_) {
      Family described = side.family;
      if (!is_prefill_ && side.faults.has(FaultKind::kGeometry)) ++described.geometry.block_tokens;
      put_family(writer, described, memory_.intervals());
    }
    for (const std::string& bytes : coordinator_.all_gather(writer.bytes())) {
      Reader reader(bytes);
      for (Side& side : sides_) {
        const FamilyDescription& peer = side.peers.emplace_back(get_family(reader));
        if (peer.family.geometry.hash() != side.family.geometry.hash()) {
          throw Failure(std::string(rejection_name(RejectionCode::kGeometryMismatch)) + ": family " +
                        side.family.geometry.name + " of rank " + std::to_string(side.peers.size() - 1));
        }
        if (const auto rejection = validate_family({peer.family, peer.memory})) throw Failure(rejection->text);
      }
    }
  }

  void run_batch(const RequestBatch& batch) {
    std::vector<std::vector<Part>> parts = agree_on(batch);
    if (options_.check) {
      for (Side& side : sides_) prepare(side, batch);
      gpu_.upload(device_, host_, bytes_, slab_stream_);
    }
    coordinator_.barrier();
    const std::uint64_t begin_ns = monotonic_ns();
    for (std::size_t i = 0; i < sides_.size(); ++i) post(sides_[i], parts[i]);
    std::vector<bool> done(sides_.size());
    while (std::find(done.begin(), done.end(), false) != done.end()) {
      for (std::size_t i = 0; i < sides_.size(); ++i) {
        if (done[i]) continue;
        nccl_.check_async(sides_[i].comm);
        if (!gpu_.idle(sides_[i].stream)) continue;
        done[i] = true;
        count(sides_[i], parts[i], monotonic_ns() - begin_ns, options_.is_timed(*batch.front()));
      }
      sched_yield();
    }
    if (options_.check) gpu_.download(host_, device_, bytes_, slab_stream_);
    notify(parts);
    for (std::size_t i = 0; i < sides_.size(); ++i) finish(sides_[i], batch, parts[i]);
  }

  // Exchanges the block lists of all ranks, then the rejections. Returns the parts that no side has rejected; only
  // these are posted.
  std::vector<std::vector<Part>> agree_on(const RequestBatch& batch) {
    Writer lists;
    for (Side& side : sides_) put_lists(side, batch, lists);
    std::vector<std::map<std::uint32_t, BlockList>> announced(sides_.size() *
                                                              static_cast<std::size_t>(options_.job.nranks));
    const std::vector<std::string> all = coordinator_.all_gather(lists.bytes());
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      Reader reader(all[rank]);
      for (std::size_t i = 0; i < sides_.size(); ++i) {
        for (auto count = reader.get<std::uint64_t>(); count > 0; --count) {
          const auto id = reader.get<std::uint32_t>();
          announced[rank * sides_.size() + i].emplace(id, reader.get_list());
        }
      }
    }
    std::vector<std::vector<Part>> parts(sides_.size());
    Writer rejections;
    for (std::size_t i = 0; i < sides_.size(); ++i) {
      std::map<std::uint32_t, BlockReservations> reservations;  // by decode rank
      for (const Request* const request : batch) {
        if (!is_own(*request)) continue;
        for (std::uint32_t share = 0; share < options_.tp_ratio; ++share) {
          const std::uint32_t decode = request->engine * options_.tp_ratio + share;
          if (!is_prefill_ && decode != index_) continue;
          const int decode_rank = options_.prefills + static_cast<int>(decode);
          const auto list_of = [&](int rank) -> const BlockList* {
            const auto& lists_of_rank = announced[static_cast<std::size_t>(rank) * sides_.size() + i];
            const auto found = lists_of_rank.find(request->id);
            return found == lists_of_rank.end() ? nullptr : &found->second;
          };
          const BlockList* const source = list_of(static_cast<int>(request->prefill));
          const BlockList* const destination = list_of(decode_rank);
          if (source == nullptr || destination == nullptr) continue;  // the owner of the list has rejected it
          Part part{request, is_prefill_ ? decode_rank : static_cast<int>(request->prefill), decode, *source,
                    *destination};
          const auto& peer = sides_[i].peers[static_cast<std::size_t>(decode_rank)];
          auto& reservation = reservations.try_emplace(decode, peer.family.num_blocks).first->second;
          if (const auto rejection = validate(sides_[i], part, reservation)) {
            sides_[i].stats.rejected.push_back(
                {request->id, is_prefill_ ? "prefill" : "decode", rejection->code, rejection->text});
            rejections.put(std::uint64_t{i}).put(request->id).put(decode);
          } else {
            parts[i].push_back(std::move(part));
          }
        }
      }
    }
    for (const std::string& bytes : coordinator_.all_gather(rejections.bytes())) {
      Reader reader(bytes);
      while (!reader.rest().empty()) {
        const auto i = reader.get<std::uint64_t>();
        const auto id = reader.get<std::uint32_t>();
        const auto decode = reader.get<std::uint32_t>();
        std::erase_if(parts.at(i), [&](const Part& part) { return part.request->id == id && part.decode == decode; });
      }
    }
    return parts;
  }

  void put_lists(Side& side, const RequestBatch& batch, Writer& writer) {
    const std::uint32_t tokens = side.family.geometry.block_tokens;
    std::vector<std::pair<std::uint32_t, BlockList>> lists;
    side.blocks.clear();
    for (const Request* const request : batch) {
      if (!is_own(*request)) continue;
      const std::size_t count = request->blocks(tokens) - request->hit_blocks(tokens);
      auto& blocks = side.blocks[request->id] = side.pool.take(count);
      BlockList list = make_list(side.family, blocks);
      const Fault* const fault = is_prefill_ ? nullptr : side.faults.find(FaultKind::kInvalidList, request->id, 0);
      if (fault != nullptr && !fault->in_flight) corrupt_block(list, fault->code, side.family.num_blocks);
      const std::uint64_t begin = monotonic_ns();
      auto rejection = validate_list({side.family, memory_.intervals()}, list, count);
      if (!rejection && !is_prefill_)
        rejection = BlockReservations(side.family.num_blocks).reserve(request->id, list.blocks);
      side.stats.validation_ns += monotonic_ns() - begin;
      ++side.stats.validations;
      if (rejection) {
        side.stats.rejected.push_back({request->id, "decode", rejection->code, rejection->text});
        continue;
      }
      if (fault != nullptr && fault->in_flight) corrupt_block(list, fault->code, side.family.num_blocks);
      lists.emplace_back(request->id, std::move(list));
    }
    writer.put(std::uint64_t{lists.size()});
    for (const auto& [id, list] : lists) writer.put(id).put_list(list);
  }

  // Validates the peer's list; each rank has validated its own list in put_lists().
  std::optional<Rejection> validate(Side& side, const Part& part, BlockReservations& reservations) {
    const std::uint64_t begin = monotonic_ns();
    const FamilyDescription& peer = side.peers[static_cast<std::size_t>(part.peer)];
    const std::size_t count = side.blocks.at(part.request->id).size();
    std::optional<Rejection> rejection;
    if (is_prefill_) {
      rejection = validate_list({peer.family, peer.memory}, part.destination, count);
      if (!rejection) rejection = reservations.reserve(part.request->id, part.destination.blocks);
    } else {
      rejection = validate_list({peer.family, peer.memory}, part.source, count);
    }
    if (!rejection && is_prefill_) rejection = validate_pair(part.source, part.destination);
    side.stats.validation_ns += monotonic_ns() - begin;
    ++side.stats.validations;
    return rejection;
  }

  // Fills the source blocks, or poisons the destination blocks.
  void prepare(Side& side, const RequestBatch& batch) const {
    for (const Request* const request : batch) {
      if (!is_own(*request)) continue;
      if (is_prefill_) {
        side.contents.fill(share_of(side, *request));
      } else {
        side.contents.poison(share_of(side, *request));
      }
    }
  }

  void post(Side& side, std::vector<Part>& parts) {
    if (puts_) return put(side, parts);
    const Geometry& geometry = side.family.geometry;
    std::size_t next = 0;
    for (Part& part : parts) {
      part.staged_at = next;
      next += bytes_of(geometry, part);
      if (is_prefill_) copy(side, part);
    }
    nccl_.group_start();
    for (const Part& part : parts) {
      const std::size_t bytes = bytes_of(geometry, part);
      if (is_prefill_) {
        nccl_.send(side.staging + part.staged_at, bytes, part.peer, side.comm, side.stream);
      } else {
        nccl_.recv(side.staging + part.staged_at, bytes, part.peer, side.comm, side.stream);
      }
    }
    nccl_.group_end();
    if (is_prefill_) return;
    for (const Part& part : parts) copy(side, part);
  }

  // Puts each block to its place in the decode rank's slab. The decode side waits for a signal for each block. NCCL
  // starts all puts of a group at once; without a group each one would wait for the end of the one before.
  void put(Side& side, const std::vector<Part>& parts) {
    const Geometry& geometry = side.family.geometry;
    std::map<int, int> wanted;  // signals, by rank
    nccl_.group_start();
    for (const Part& part : parts) {
      const FamilyDescription& peer = side.peers[static_cast<std::size_t>(part.peer)];
      const std::size_t count = blocks_of(geometry, part);
      for (std::size_t message = 0; is_prefill_ && message < count; ++message) {
        const MessagePosition place = position_of(geometry, part.destination.blocks.size(), message);
        const std::uint64_t target =
            peer.family.address(place.layer, place.entry, part.destination.blocks[place.position]);
        puts_->put_signal(on_device(piece_of(side, part, message)), geometry.part_bytes(), part.peer, side.window,
                          target - peer.memory.all().front().begin + kGuard, side.comm, side.stream);
      }
      if (!is_prefill_) wanted[part.peer] += static_cast<int>(count);
    }
    nccl_.group_end();
    std::vector<NcclPuts::Signals> signals;
    for (const auto& [rank, count] : wanted) signals.push_back({count, rank});
    puts_->wait(signals, side.comm, side.stream);
  }

  // Copies between the part's blocks and the staging buffer.
  void copy(Side& side, const Part& part) {
    const Geometry& geometry = side.family.geometry;
    const std::size_t piece = geometry.part_bytes();
    const std::size_t count = bytes_of(geometry, part) / piece;
    for (std::size_t message = 0; message < count; ++message) {
      std::byte* const staged = side.staging + part.staged_at + message * piece;
      std::byte* const block = on_device(piece_of(side, part, message));
      if (is_prefill_) {
        gpu_.copy(staged, block, piece, side.stream);
      } else {
        gpu_.copy(block, staged, piece, side.stream);
      }
    }
  }

  void count(Side& side, const std::vector<Part>& parts, std::uint64_t elapsed_ns, bool timed) const {
    FamilyStats& stats = side.stats;
    stats.elapsed_ns += elapsed_ns;
    if (timed) stats.timed_ns += elapsed_ns;
    for (const Part& part : parts) {
      const std::size_t bytes = bytes_of(side.family.geometry, part);
      const std::size_t messages = puts_ ? blocks_of(side.family.geometry, part) : 1;
      if (is_prefill_) {
        stats.sent_messages += messages;
        stats.sent_bytes += bytes;
      } else {
        stats.received_messages += messages;
        stats.received_bytes += bytes;
        if (!timed) continue;
        stats.latencies_ns.push_back(elapsed_ns);
        stats.timed_messages += messages;
        stats.timed_bytes += bytes;
      }
    }
  }

  // Sends a notification for each part whose data was sent. The decode side counts a part as served only with its data
  // and its notification.
  void notify(const std::vector<std::vector<Part>>& parts) {
    Writer writer;
    for (std::size_t i = 0; is_prefill_ && i < sides_.size(); ++i) {
      for (const Part& part : parts[i]) {
        const std::uint64_t bytes = bytes_of(sides_[i].family.geometry, part);
        const Notification notification{{part.request->id, 0},
                                        sides_[i].family.geometry.family,
                                        part.source.blocks.size(),
                                        bytes,
                                        crc_of(sides_[i], part)};
        writer.put(std::uint64_t{i}).put(part.decode).put(notification);
        ++sides_[i].stats.notifications;
      }
    }
    std::map<std::pair<std::uint64_t, std::uint32_t>, Notification> received_notifications;
    for (const std::string& bytes : coordinator_.all_gather(writer.bytes())) {
      Reader reader(bytes);
      while (!reader.rest().empty()) {
        const auto i = reader.get<std::uint64_t>();
        const auto decode = reader.get<std::uint32_t>();
        const auto notification = reader.get<Notification>();
        if (!is_prefill_ && decode == index_) received_notifications[{i, notification.which.request}] = notification;
      }
    }
    for (std::size_t i = 0; !is_prefill_ && i < sides_.size(); ++i) {
      FamilyStats& stats = sides_[i].stats;
      for (const Part& part : parts[i]) {
        const std::uint64_t bytes = bytes_of(sides_[i].family.geometry, part);
        const auto found = received_notifications.find({i, part.request->id});
        if (found == received_notifications.end() || found->second.bytes != bytes ||
            found->second.blocks != part.source.blocks.size()) {
          throw Failure("request " + std::to_string(part.request->id) + ": the notification is missing or wrong");
        }
        ++stats.served;
        stats.served_bytes += bytes;
        const std::uint32_t crc = crc_of(sides_[i], part);
        stats.crc_sum += crc;
        if (options_.check && found->second.crc != crc) ++stats.crc_errors;
      }
    }
  }

  // Checks the requests of the batch, frees their blocks, and checks the canaries of all blocks.
  void finish(Side& side, const RequestBatch& batch, const std::vector<Part>& parts) {
    const auto served = [&](std::uint32_t id) {
      return std::any_of(parts.begin(), parts.end(), [&](const Part& part) { return part.request->id == id; });
    };
    for (const Request* const request : batch) {
      if (!is_own(*request)) continue;
      const std::vector<std::uint32_t>& blocks = side.blocks.at(request->id);
      if (options_.check) {
        if (is_prefill_ || served(request->id)) {
          std::string where;
          const std::uint64_t wrong = side.contents.check(share_of(side, *request), where);
          side.stats.wrong_bytes += wrong;
          if (wrong > 0) side.stats.add_error(where);
        }
        side.contents.set_canaries(blocks);
      }
      side.pool.give_back(blocks);
    }
    if (!options_.check) return;
    std::vector<std::uint32_t> all(side.family.num_blocks);
    std::iota(all.begin(), all.end(), 0U);
    std::string where;
    const std::uint64_t wrong = side.contents.check_canaries(all, where);
    side.stats.wrong_bytes += wrong;
    if (wrong > 0) side.stats.add_error(where);
  }

  ExitStatus report() {
    Report report{.options = options_};
    report.memory_of_rank_0 = gpu_.describe();
    report.transport = "NCCL " + nccl_.version() + " (" + environment("NCCL_NET") + ", " +
                       environment("NCCL_NET_PLUGIN") + "; " + gpu_.describe() + ")";
    report.longest_blocks = layout_.longest_blocks;
    report.families = layout_.reports;
    for (FamilyReport& family : report.families) {
      if (!puts_) family.plan.messages = family.plan.requests;
    }
    std::vector<const FamilyStats*> stats;
    for (const Side& side : sides_) stats.push_back(&side.stats);
    report.add_all_ranks(coordinator_, {.bytes = bytes_, .allocations = 1, .damage = memory_.damage()},
                         puts_ ? std::nullopt : counters_.text(), stats);
    if (options_.job.rank == 0) {
      print(stdout, report);
      if (!options_.json.empty()) write(report, options_.json);
    }
    return report.status();
  }

  bool is_own(const Request& request) const {
    return is_prefill_ ? request.prefill == index_ : request.engine == index_ / options_.tp_ratio;
  }
  BlockShare share_of(const Side& side, const Request& request) const {
    const Geometry& geometry = side.family.geometry;
    return {request.id, request.hit_blocks(geometry.block_tokens),
            is_prefill_ ? 0 : geometry.part_offset(index_ % geometry.tp_ratio), side.blocks.at(request.id)};
  }
  static std::size_t blocks_of(const Geometry& geometry, const Part& part) {  // of all layers and entries
    return part.source.blocks.size() * geometry.layers * geometry.entries;
  }
  static std::size_t bytes_of(const Geometry& geometry, const Part& part) {
    return blocks_of(geometry, part) * geometry.part_bytes();
  }
  std::byte* piece_of(const Side& side, const Part& part, std::size_t message) const {
    const Geometry& geometry = side.family.geometry;
    const auto& blocks = is_prefill_ ? part.source.blocks : part.destination.blocks;
    const MessagePosition place = position_of(geometry, blocks.size(), message);
    const std::size_t offset = is_prefill_ ? geometry.part_offset(part.decode % geometry.tp_ratio) : 0;
    return reinterpret_cast<std::byte*>(side.family.address(place.layer, place.entry, blocks[place.position]) + offset);
  }
  std::byte* on_device(const std::byte* host) const { return device_ + static_cast<std::size_t>(host - host_); }
  std::uint32_t crc_of(const Side& side, const Part& part) const {
    Crc32 crc;
    if (!options_.check) return 0;
    const std::size_t piece = side.family.geometry.part_bytes();
    const std::size_t count = bytes_of(side.family.geometry, part) / piece;
    for (std::size_t message = 0; message < count; ++message) crc.add(piece_of(side, part, message), piece);
    return crc.value();
  }

  const Options options_;
  ranks::CoordinatorConnection& coordinator_;
  const std::vector<Request> requests_;
  const bool is_prefill_;
  const std::uint32_t index_;  // among the prefill or the decode ranks
  const ranks::PluginCounters counters_;
  Layout layout_;
  const std::unique_ptr<memory::Memory> host_memory_ = memory::make_host_memory(options_.pages);
  CacheMemory memory_;  // the host copy of the GPU's slab before and after each batch, guards included
  const std::vector<RequestBatch> batches_;
  Gpu gpu_;
  const Gpu::Stream slab_stream_;  // copies the whole slab while the streams of the families are idle
  const Nccl nccl_;
  std::optional<NcclPuts> puts_;  // of --mode nccl-put
  std::byte* host_ = nullptr;
  std::size_t bytes_ = 0;
  std::byte* device_ = nullptr;
  std::vector<Side> sides_;
};

}  // namespace

std::unique_ptr<ranks::Rank> make_nccl_rank(const Options& options, ranks::CoordinatorConnection& coordinator) {
  return std::make_unique<NcclRank>(options, coordinator);
}

}  // namespace verbatim::kv
