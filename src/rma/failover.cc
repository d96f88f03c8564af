#include "rma/failover.h"

#include <pthread.h>

#include <csignal>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "rma/context_set.h"
#include "wire/rma.h"

namespace verbatim::rma {

Failover::Failover(const ContextSet& set, const std::vector<std::uint32_t>& lanes, Send send)
    : set_(set), lane_counts_(lanes), send_(std::move(send)) {
  for (const std::uint32_t count : lane_counts_) lanes_.push_back(std::make_unique<Lane[]>(count));
}

Failover::~Failover() {
  if (thread_.joinable()) thread_.join();
}

bool Failover::begin(std::uint32_t peer, std::uint32_t lane) {
  const MutexLock lock(mutex_);
  if (at(peer, lane).failed.load()) return false;
  ++changes_;
  at(peer, lane).failed = true;
  jobs_.push_back({peer, lane});
  start_thread();
  return true;
}

bool Failover::lane_failed(std::uint32_t peer, std::uint32_t lane, const std::string& why) {
  if (is_last(peer, lane)) return false;
  if (!begin(peer, lane)) return true;
  VERBATIM_WARN(
      "RMA from rank %u to %s: lane %u of %u (%s) has failed: %s; lane %u (%s) is used from now on. Next: look at this "
      "port, its cable and its switch, at both ends",
      set_.own_rank(), set_.name_of_peer(peer).c_str(), lane + 1, lane_counts_[peer], set_.lane_port(lane).name.c_str(),
      why.c_str(), lane + 2, set_.lane_port(lane + 1).name.c_str());
  return true;
}

void Failover::port_down(const Device& device, std::uint8_t port) {
  std::size_t left = 0;
  std::size_t last = 0;
  const Port* used = nullptr;
  for (std::uint32_t peer = 0; peer < lane_counts_.size(); ++peer) {
    for (std::uint32_t lane = 0; lane < lane_counts_[peer]; ++lane) {
      const Port& own = set_.lane_port(lane);
      if (own.device != &device || own.port_num != port) continue;
      used = &own;
      if (is_last(peer, lane)) {
        last += set_.is_own(peer) ? 0U : 1U;
      } else if (begin(peer, lane) && !set_.is_own(peer)) {
        ++left;
      }
    }
  }
  if (left == 0) return;
  VERBATIM_WARN(
      "RMA at rank %u: the link of %s is down: its lanes to %zu ranks are not used any more, and %zu have no other "
      "one. "
      "Next: look at this port, its cable and its switch",
      set_.own_rank(), used->name.c_str(), left, last);
}

void Failover::peer_fenced(std::uint32_t peer, std::uint32_t lane, const Psns& psns) {
  if (peer >= lane_counts_.size() || lane >= lane_counts_[peer] || is_last(peer, lane)) return;
  if (begin(peer, lane)) {
    VERBATIM_INFO("RMA from rank %u to %s: lane %u of %u has failed at the other end", set_.own_rank(),
                  set_.name_of_peer(peer).c_str(), lane + 1, lane_counts_[peer]);
  }
  const MutexLock lock(mutex_);
  if (!at(peer, lane).peer_psns) at(peer, lane).peer_psns = psns;
}

std::optional<Failover::Psns> Failover::fenced_by_both(std::uint32_t peer, std::uint32_t lane) {
  const MutexLock lock(mutex_);
  if (!at(peer, lane).fenced) return std::nullopt;
  return at(peer, lane).peer_psns;
}

void Failover::start_thread() {
  if (running_) return;
  running_ = true;
  if (thread_.joinable()) thread_.join();  // it has set running_ to false as its last step
  // No signal of the application may be handled on a thread of the plugin.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    VERBATIM_WARN("RMA at rank %u: no thread could be started to leave a lane; that is tried again with the next one",
                  set_.own_rank());
    running_ = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Failover::run() noexcept {
  while (true) {
    Job job;
    {
      const MutexLock lock(mutex_);
      running_ = !jobs_.empty();
      if (!running_) return;
      job = jobs_.front();
      jobs_.pop_front();
    }
    try {
      fence(job);
    } catch (...) {
      VERBATIM_WARN("RMA at rank %u: no memory to leave a lane to %u", set_.own_rank(), job.peer);
    }
  }
}

void Failover::fence(const Job& job) {
  const Device& device = *set_.lane_port(job.lane).device;
  Psns psns(set_.contexts(), wire::kNoPsn);
  for (std::uint32_t context = 0; context < set_.contexts(); ++context) {
    ibv_qp* const qp = set_.queue_at(context, job.peer).qp_of(job.lane);
    // A device that refuses has failed: then nothing is known.
    if (!to_error(qp, device)) continue;
    const Result<std::uint32_t> psn = expected_psn(qp, device);
    if (psn) psns[context] = *psn;
  }
  if (set_.is_own(job.peer)) {
    const MutexLock lock(mutex_);
    at(job.peer, job.lane).peer_psns = psns;
    at(job.peer, job.lane).fenced = true;
    return;
  }
  {
    const MutexLock lock(mutex_);
    at(job.peer, job.lane).fenced = true;
  }
  send_(job.peer, job.lane, psns);
}

}  // namespace verbatim::rma
