#include "verbatim-kv/registrations.h"

#include <sched.h>

namespace verbatim::kv {

using ranks::require;

Registrations::Registrations(ranks::LoadedPlugin& plugin, int device, const memory::Memory& memory,
                             const IntervalSet& intervals)
    : plugin_(plugin),
      device_(device),
      memory_(memory),
      intervals_(intervals),
      shared_(plugin.devices()[static_cast<std::size_t>(device)].reg_is_global != 0) {
  if (!shared_) return;
  connect_to_self();
  mhandles_ = register_all(send_comm_);
}

void Registrations::connect_to_self() {
  void* listen_comm = nullptr;
  require(plugin_->listen(plugin_.context(), device_, handle_.data(), &listen_comm), "listen");
  while (send_comm_ == nullptr || recv_comm_ == nullptr) {
    if (send_comm_ == nullptr) {
      require(plugin_->connect(plugin_.context(), device_, handle_.data(), &send_comm_), "connect to itself");
    }
    if (recv_comm_ == nullptr) require(plugin_->accept(listen_comm, &recv_comm_), "accept from itself");
    sched_yield();
  }
  require(plugin_->close_listen(listen_comm), "closeListen");
}

std::vector<void*> Registrations::register_all(void* comm) {
  std::vector<void*> mhandles;
  for (const Interval& interval : intervals_.all()) {
    mhandles.push_back(memory_.register_at(plugin_, device_, comm, reinterpret_cast<std::byte*>(interval.begin),
                                           interval.end - interval.begin));
    ++calls_;
  }
  return mhandles;
}

std::vector<void*> Registrations::attach(void* comm) {
  return shared_ ? mhandles_ : register_all(comm);
}

void Registrations::detach(void* comm, const std::vector<void*>& mhandles) {
  if (shared_) return;
  for (void* const mhandle : mhandles) plugin_->dereg_mr(comm, mhandle);
}

void Registrations::release() {
  if (!shared_) return;
  for (void* const mhandle : mhandles_) require(plugin_->dereg_mr(send_comm_, mhandle), "deregMr");
  require(plugin_->close_send(send_comm_), "closeSend");
  require(plugin_->close_recv(recv_comm_), "closeRecv");
}

}  // namespace verbatim::kv
