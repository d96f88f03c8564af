#include "simulation/device.h"

#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <chrono>
#include <cstdlib>

namespace simulation {
namespace {

constexpr std::chrono::milliseconds kPeriod{10};

void* verbs_library() {
  static void* const library = ::dlopen(std::getenv("VERBATIM_VERBS_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
  return library;
}

// The counting library's, or softverbs' where that has none.
template <typename Function>
Function verb(const char* name) {
  void* const found = ::dlsym(verbs_library(), name);
  if (found == nullptr) std::abort();
  return reinterpret_cast<Function>(found);
}

#define VERB(name) verb<decltype(&name)>(#name)

}  // namespace

DeviceClock::DeviceClock() {
  int count = 0;
  ibv_device** const devices = VERB(ibv_get_device_list)(&count);
  if (devices == nullptr || count == 0) std::abort();
  context_ = VERB(ibv_open_device)(devices[0]);
  VERB(ibv_free_device_list)(devices);
  if (context_ == nullptr) std::abort();
  cq_ = VERB(ibv_create_cq)(context_, 1, nullptr, nullptr, 0);
  if (cq_ == nullptr) std::abort();
  thread_ = std::thread([this] { run(); });
}

DeviceClock::~DeviceClock() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
  VERB(ibv_destroy_cq)(cq_);
  VERB(ibv_close_device)(context_);
}

void DeviceClock::run() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kPeriod, [this] { return ends_; })) {
    ibv_wc completion{};
    ibv_poll_cq(cq_, 1, &completion);
  }
}

}  // namespace simulation
