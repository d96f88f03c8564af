#include "simulation/messages.h"

#include <sched.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "simulation/scheduler.h"

namespace simulation {
namespace {

constexpr std::size_t kGroups = 24;
constexpr std::size_t kUsualConnections = 4;

Group draw_group(Draw& draw) {
  Group drawn;
  drawn.sizes.resize(1 + draw.below(kMaxMembers));
  for (std::size_t& size : drawn.sizes) size = draw.size();
  drawn.order.resize(drawn.sizes.size());
  std::iota(drawn.order.begin(), drawn.order.end(), std::size_t{0});
  draw.shuffle(drawn.order);
  drawn.spare = draw.below(2) * draw.below(500);
  return drawn;
}

// Where a member's buffer begins, and for the number of members the size of all buffers.
std::size_t offset_of(const Group& group, std::size_t member) {
  std::size_t offset = 0;
  for (std::size_t i = 0; i < member; ++i) offset += group.sizes[i] + group.spare + kGuardBytes;
  return offset;
}

}  // namespace

std::vector<ConnectionPlan> draw_connections(Draw& draw, std::size_t processes) {
  std::vector<ConnectionPlan> connections(1 + draw.below(std::max(kUsualConnections, processes)));
  for (ConnectionPlan& connection : connections) {
    connection.number = static_cast<std::size_t>(&connection - connections.data());
    connection.receiver = draw.below(processes);
    connection.sender = draw.below(processes);
    connection.listen_stays = std::none_of(connections.data(), &connection, [&](const ConnectionPlan& other) {
      return other.receiver == connection.receiver;
    });
    connection.receives_in_gpu_memory = draw.one_in(2);
    std::generate_n(std::back_inserter(connection.groups), kGroups, [&] { return draw_group(draw); });
  }
  return connections;
}

void complete_optionally(ConnectionPlan& connection, bool all) {
  constexpr std::size_t kLeast = 16;  // of LL; so many bytes are not there by chance
  connection.receives_in_gpu_memory = false;
  const std::size_t size = std::max(connection.groups.front().sizes[0], kLeast);
  for (std::size_t i = 0; i < connection.groups.size(); i += all ? 1 : 2) {
    Group& group = connection.groups[i];
    group.sizes.assign(1, size);
    group.order.assign(1, 0);
    group.completes_optionally = true;
  }
}

void Connection::receive() {
  End end{.sends = false, .call = receiver_};
  void* listen_comm = nullptr;
  bool ok =
      end.call("table listen", [&] { return net_.listen(context_, device_, handle_.bytes.data(), &listen_comm); });
  handle_.is_there = ok;
  note_progress();
  while (ok && end.comm == nullptr && !handle_.is_given_up && !has_lost_process()) {
    ok = end.call(
        "table accept", [&] { return net_.accept(listen_comm, &end.comm); }, faults_.may_change_gids());
    if (end.comm == nullptr) ::sched_yield();
  }
  const bool stays = plan_.listen_stays && has_aborted();
  if (listen_comm != nullptr && !stays) end.call("table closeListen", [&] { return net_.close_listen(listen_comm); });
  exchange(end);
}

void Connection::send() {
  End end{.sends = true, .call = sender_};
  while (!handle_.is_there && !handle_.is_given_up && !has_lost_process()) ::sched_yield();
  auto handle = handle_.bytes;  // connect may write into it
  bool ok = handle_.is_there;
  while (ok && end.comm == nullptr && !has_aborted()) {
    ok = end.call(
        "table connect", [&] { return net_.connect(context_, device_, handle.data(), &end.comm); },
        faults_.may_change_gids());
    if (end.comm == nullptr) ::sched_yield();
  }
  exchange(end);
}

void Connection::exchange(End& end) {
  if (end.comm == nullptr) {
    handle_.is_given_up = true;
  } else if (!faults_.may_change_gids()) {
    ++handle_.connected_ends;
  }
  note_progress();
  if (end.comm == nullptr) return;
  bool ok = add_buffers(end);
  while (ok && end.done < plan_.groups.size() && !has_aborted() && !waits_in_vain(end)) {
    faults_.wait_while_idle();
    bool moved = false;
    ok = make_progress(end, moved);
    if (moved) {
      note_progress();
    } else {
      ::sched_yield();
    }
  }
  const bool is_done = end.done == plan_.groups.size();
  if (is_done && !end.sends && plan_.receives_in_gpu_memory && flushes_ == 0)
    end.call.add_problem("no receive was flushed");
  // A receiver with optional completion does not find it.
  if (!is_done && end.sends && plan_.groups.front().completes_optionally) handle_.is_given_up = true;
  if (ok && !is_done && has_aborted()) count_fault(Fault::kAbort);
  close(end);
}

void Connection::close(End& end) {
  for (Slot& slot : end.slots) {
    if (slot.mhandle != nullptr) end.call("table deregMr", [&] { return net_.dereg_mr(end.comm, slot.mhandle); });
  }
  end.call(end.sends ? "table closeSend" : "table closeRecv",
           [&] { return end.sends ? net_.close_send(end.comm) : net_.close_recv(end.comm); });
  // Also of the last groups that are done: nothing is written any more.
  for (const Slot& slot : end.slots) {
    const bool is_done = !slot.in_use && slot.posted != 0;
    const bool is_known = is_done || (slot.in_use && !plan_.groups[slot.group].completes_optionally);
    if (!end.sends && is_known) check_bytes(slot, is_done);
  }
}

bool Connection::add_buffers(End& end) {
  std::size_t largest = 0;
  for (const Group& group : plan_.groups) largest = std::max(largest, offset_of(group, group.sizes.size()));
  largest = (largest / kPageBytes + 1) * kPageBytes;  // a dma-buf has whole pages
  return std::all_of(end.slots.begin(), end.slots.end(), [&](Slot& slot) {
    slot.buffer = std::make_unique<fault::DmaBuf>(largest);
    unsigned char* const data = slot.buffer->data();
    if (end.sends || !plan_.receives_in_gpu_memory) {
      return end.call("table regMr",
                      [&] { return net_.reg_mr(end.comm, data, largest, nccl::kPtrHost, &slot.mhandle); });
    }
    return end.call("table regMrDmaBuf", [&] {
      return net_.reg_mr_dmabuf(end.comm, data, largest, nccl::kPtrCuda, 0, slot.buffer->fd(), &slot.mhandle);
    });
  });
}

bool Connection::make_progress(End& end, bool& moved) {
  while (end.next < plan_.groups.size()) {
    if (now() < faults_.begin_of(end.next, plan_.groups.size())) break;
    Slot& slot = end.slots[end.next % kSlots];
    if (slot.in_use && slot.group != end.next) break;
    if (!slot.in_use) begin(end, slot, end.next);
    const std::size_t before = slot.posted;
    if (!(end.sends ? post_sends(end, slot) : post_receive(end, slot))) return false;
    moved = moved || slot.posted != before;
    if (slot.posted < needed(end, end.next)) break;
    ++end.next;
  }
  return std::all_of(end.slots.begin(), end.slots.end(), [&](Slot& slot) {
    if (!slot.in_use) return true;
    bool done = false;
    if (!test(end, slot, done)) return false;
    if (!done) return true;
    slot.in_use = false;
    moved = true;
    ++end.done;
    note_that_it_works(end);
    return true;
  });
}

// The QP for flushes is made at the first one, too.
void Connection::note_that_it_works(End& end) {
  const bool has_flushed = end.sends || !plan_.receives_in_gpu_memory || flushes_ != 0;
  if (!faults_.may_change_gids() || !has_flushed || end.works) return;
  end.works = true;
  ++handle_.connected_ends;
}

void Connection::begin(const End& end, Slot& slot, std::size_t group) {
  slot.group = group;
  slot.posted = 0;
  slot.requests.clear();
  slot.in_use = true;
  std::fill_n(slot.buffer->data(), slot.buffer->bytes(), kUnwritten);
  for (std::size_t i = 0; end.sends && i < plan_.groups[group].sizes.size(); ++i) {
    unsigned char* const data = slot.buffer->data() + offset_of(plan_.groups[group], i);
    for (std::size_t at = 0; at < plan_.groups[group].sizes[i]; ++at) data[at] = content(group, i, plan_.number, at);
  }
}

bool Connection::post_sends(End& end, Slot& slot) {
  const Group& group = plan_.groups[slot.group];
  while (slot.posted < group.order.size()) {
    const std::size_t member = group.order[slot.posted];
    void* request = nullptr;
    const bool ok = end.call("table isend", [&] {
      return net_.isend(end.comm, slot.buffer->data() + offset_of(group, member), group.sizes[member],
                        static_cast<int>(member), slot.mhandle, &request);
    });
    if (!ok || request == nullptr) return ok;
    slot.requests.push_back(request);
    ++slot.posted;
  }
  return true;
}

bool Connection::post_receive(End& end, Slot& slot) {
  const Group& group = plan_.groups[slot.group];
  const std::size_t count = group.sizes.size();
  std::vector<void*> data(count);
  std::vector<std::size_t> capacities(count);
  std::vector<int> tags(count);
  std::vector<void*> mhandles(count, slot.mhandle);
  for (std::size_t i = 0; i < count; ++i) {
    data[i] = slot.buffer->data() + offset_of(group, i);
    capacities[i] = group.sizes[i] + group.spare;
    tags[i] = static_cast<int>(i);
  }
  void* request = group.completes_optionally ? reinterpret_cast<void*>(nccl::kNetOptionalRecvCompletion) : nullptr;
  const bool ok = end.call("table irecv", [&] {
    return net_.irecv(end.comm, static_cast<int>(count), data.data(), capacities.data(), tags.data(), mhandles.data(),
                      &request);
  });
  if (!ok || request == nullptr) return ok;
  slot.requests.push_back(request);
  slot.posted = 1;
  return true;
}

bool Connection::test(End& end, Slot& slot, bool& done) {
  const bool completes_optionally = !end.sends && plan_.groups[slot.group].completes_optionally;
  for (std::size_t i = 0; i < slot.requests.size(); ++i) {
    if (slot.requests[i] == nullptr) continue;
    int is_done = 0;
    if (!end.call("table test", [&] { return net_.test(slot.requests[i], &is_done, end.sizes.data()); })) return false;
    record("done", is_done);
    if (is_done == 0) return true;
    count_done();
    slot.requests[i] = nullptr;
    if (end.sends || i != 0 || completes_optionally) continue;
    check_sizes(end, slot);
    if (!flush(end, slot)) return false;
  }
  done = slot.posted == needed(end, slot.group) && (!completes_optionally || has_come(slot));
  if (done && !end.sends) check_bytes(slot, true);
  return true;
}

// The request of the flush, which only GPU memory has, is tested behind that of the receive.
bool Connection::flush(End& end, Slot& slot) {
  const Group& group = plan_.groups[slot.group];
  const std::size_t count = group.sizes.size();
  std::vector<void*> data(count);
  std::vector<int> sizes(count);
  std::vector<void*> mhandles(count, slot.mhandle);
  for (std::size_t i = 0; i < count; ++i) {
    data[i] = slot.buffer->data() + offset_of(group, i);
    sizes[i] = static_cast<int>(group.sizes[i]);
  }
  void* request = nullptr;
  const bool ok = end.call("table iflush", [&] {
    return net_.iflush(end.comm, static_cast<int>(count), data.data(), sizes.data(), mhandles.data(), &request);
  });
  if (!ok || request == nullptr) return ok;
  slot.requests.push_back(request);
  ++flushes_;
  return true;
}

// Of one message. Mostly its last bytes come last.
bool Connection::has_come(const Slot& slot) const {
  const unsigned char* const data = slot.buffer->data();
  std::size_t left = plan_.groups[slot.group].sizes[0];
  while (left > 0 && data[left - 1] == content(slot.group, 0, plan_.number, left - 1)) --left;
  return left == 0;
}

// An application ends such a wait, because it finds that another process has failed.
bool Connection::waits_in_vain(const End& end) const {
  if (end.sends || (!handle_.is_given_up && !has_lost_process())) return false;
  bool waits = false;
  for (const Slot& slot : end.slots) {
    if (!slot.in_use) continue;
    waits = plan_.groups[slot.group].completes_optionally && slot.posted != 0 && slot.requests.front() == nullptr;
    if (!waits) return false;
  }
  return waits;
}

void Connection::check_sizes(const End& end, const Slot& slot) const {
  const Group& group = plan_.groups[slot.group];
  for (std::size_t i = 0; i < group.sizes.size(); ++i) {
    if (end.sizes[i] >= 0 && static_cast<std::size_t>(end.sizes[i]) == group.sizes[i]) continue;
    end.call.add_problem("a receive of " + std::to_string(group.sizes[i]) + " bytes reports " +
                         std::to_string(end.sizes[i]));
  }
}

// What is not complete, because the connection has failed, may have been written or not.
void Connection::check_bytes(const Slot& slot, bool is_complete) {
  const Group& group = plan_.groups[slot.group];
  std::size_t wrong = 0;
  std::size_t overwritten = 0;
  for (std::size_t i = 0; i < group.sizes.size(); ++i) {
    const unsigned char* const data = slot.buffer->data() + offset_of(group, i);
    for (std::size_t at = 0; at < group.sizes[i]; ++at) {
      const bool is_right =
          data[at] == content(slot.group, i, plan_.number, at) || (!is_complete && data[at] == kUnwritten);
      wrong += is_right ? 0U : 1U;
    }
    for (std::size_t at = 0; at < group.spare + kGuardBytes; ++at) {
      overwritten += data[group.sizes[i] + at] != kUnwritten ? 1U : 0U;
    }
    bytes_checked_ += group.sizes[i];
  }
  if (wrong != 0)
    receiver_.add_problem("wrong bytes: " + std::to_string(wrong) + " in group " + std::to_string(slot.group));
  if (overwritten != 0) {
    receiver_.add_problem("wrong bytes: " + std::to_string(overwritten) + " behind messages of group " +
                          std::to_string(slot.group));
  }
}

}  // namespace simulation
